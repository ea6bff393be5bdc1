"""Generation with penalties in plain Python, one sequence at a time, and masks of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal import ops


def together(
    runner: hal.Runner, texts: Sequence[Sequence[int]], params: Sequence[hal.SamplingParams]
) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in texts]
    for token in hal.generate(runner, texts, params):
        made[token.prompt_index].append(token.token_id)
    return made


def penalized(logits: list[float], prompt: list[int], made: list[int], params: hal.SamplingParams) -> list[float]:
    counts, found = Counter(made), list(logits)
    for token in {*prompt, *made}:
        penalty = params.repetition_penalty
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token, count in counts.items():
        found[token] -= params.frequency_penalty * count + params.presence_penalty
    return found


def by_hand(runner: hal.Runner, prompt: list[int], params: hal.SamplingParams) -> list[int]:
    """Return the tokens of a loop with one sequence: its logits penalized in Python."""
    made: list[int] = []
    blocks = list(range(1, 1 + runner.spec.blocks_for(len(prompt) + params.max_new_tokens)))
    new, cached = prompt, 0
    for step in range(params.max_new_tokens):
        logits = runner.step(runner.batch([new], [blocks], cached=[cached])).logits
        wide = torch.tensor([penalized(logits[0].float().tolist(), prompt, made, params)])
        if params.temperature:
            columns = [
                torch.tensor([value], dtype=dtype)
                for value, dtype in (
                    (params.temperature, torch.float32),
                    (params.top_k, torch.int32),
                    (params.top_p, torch.float32),
                    (params.min_p, torch.float32),
                    (params.seed, torch.int64),
                    (step, torch.int64),
                )
            ]
            token = int(ops.operation("sample").reference(wide, *columns))
        else:
            token = int(wide[0].argmax())
        cached += len(new)
        new = [token]
        made.append(token)
    return made


def mask_of(tokens: Sequence[int], vocab_size: int) -> Tensor:
    words = [0] * -(-vocab_size // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)
