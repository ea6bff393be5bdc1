"""Tests of Qwen3 against Hugging Face transformers: defaults of the configuration, and the trained checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch
from helpers.comparison import COMPILERS, TOLERANCE, difference, randomize, their_logits
from helpers.reference import TEXTS, open_runner, prompts
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from torch import Tensor

import hal
from hal.step import ALL

transformers = pytest.importorskip("transformers", reason="transformers is the reference")


def test_keys_left_out_of_the_config_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    defaults = {"head_dim": 128, "sliding_window": 8, "use_sliding_window": True, "attn_implementation": "eager"}
    sizes = {"hidden_size": 48, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(vocab_size=97, num_hidden_layers=2, max_position_embeddings=64, **sizes, **defaults)
    )
    randomize(model, seed=0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {"architectures", "model_type", "vocab_size", "num_hidden_layers", "max_position_embeddings", *sizes}
    kept |= {"use_sliding_window", "sliding_window"}  # has no layer below max_window_layers
    (tmp_path / "config.json").write_text(json.dumps({key: config[key] for key in kept}))

    model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    runner, tokens = open_runner(tmp_path), list(range(40))
    batch = runner.batch([tokens], [[1, 2, 3]])
    assert difference([runner.step(batch, ALL).logits], [their_logits(model, tokens)]) <= TOLERANCE


NEW_TOKENS = 32
TIE = 2
"""Number of bfloat16 ulps by which two logits may differ and still count as equal.

Rounding two logits to bfloat16 moves their difference by up to one ulp by itself. The hidden state that they are
computed from was rounded too, a dozen times a layer and in other places here than there (transformers rounds a norm
before it applies the weight, we after), which moves them by as much again.
"""
SLACK = 1.2
"""Maximum ratio of our error (against float32) to that of transformers; we round less often."""


@attrs.frozen
class Continuation:
    """The greedy continuation of a prompt by transformers in bfloat16; logits are ``[NEW_TOKENS, vocab_size]``.

    ``exact`` are its logits in float32 on the same tokens.
    """

    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    exact: Tensor


@pytest.fixture(scope="module")
def continuations(trained: Path) -> list[Continuation]:
    rounded, exact = (
        transformers.Qwen3ForCausalLM.from_pretrained(trained, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.bfloat16, torch.float32)
    )
    rounded.generation_config.eos_token_id = None  # to the maximum length
    found = []
    for prompt in prompts(trained):
        made = rounded.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        sequence = made.sequences[0].tolist()
        logits = their_logits(exact, sequence[:-1])[len(prompt) - 1 :]
        found.append(Continuation(prompt, sequence[len(prompt) :], torch.cat(made.logits).float(), logits))
    return found


def forced_logits(runner: hal.Runner, continuations: Sequence[Continuation]) -> list[Tensor]:
    """Return our logits at the tokens that transformers chose, for all prompts in one batch."""
    blocks, taken = [], 1
    for each in continuations:
        count = runner.spec.blocks_for(len(each.prompt) + NEW_TOKENS)
        blocks.append(list(range(taken, taken + count)))
        taken += count
    steps = [runner.step(runner.batch([each.prompt for each in continuations], blocks)).logits.float()]
    for step in range(NEW_TOKENS - 1):
        cached = [len(each.prompt) + step for each in continuations]
        batch = runner.batch([[each.tokens[step]] for each in continuations], blocks, cached=cached)
        steps.append(runner.step(batch).logits.float())
    return list(torch.stack(steps, dim=1))


def ulps_apart(logits: Tensor, one: int, other: int) -> float:
    """Return the distance of two logits in bfloat16 units in the last place (8 bits) at the larger one's magnitude."""
    a, b = float(logits[one]), float(logits[other])
    ulp = 2.0 ** (math.floor(math.log2(max(abs(a), abs(b)))) - 7)
    return abs(a - b) / ulp


def check_greedy(ours: Sequence[Tensor], continuations: Sequence[Continuation]) -> list[tuple[int, int]]:
    """Check our choices against transformers', token by token on its text; return the positions of ties."""
    ties = []
    for row, (logits, theirs) in enumerate(zip(ours, continuations, strict=True)):
        for step, (our_choice, their_choice) in enumerate(zip(logits.argmax(-1).tolist(), theirs.tokens, strict=True)):
            if our_choice == their_choice:
                continue
            apart = [ulps_apart(each[step], our_choice, their_choice) for each in (logits, theirs.logits, theirs.exact)]
            assert max(apart) <= TIE, f"{TEXTS[row]!r}, token {step}: {our_choice} for {their_choice}, ulps {apart}"
            ties.append((row, step))
    return ties


def error(logits: Sequence[Tensor], continuations: Sequence[Continuation]) -> float:
    """Return the root mean square distance from the float32 logits."""
    return float((torch.cat(list(logits)) - torch.cat([each.exact for each in continuations])).square().mean().sqrt())


@thorough(MODE, r"\[eager")
@thorough(EXHAUSTIVE, r"\[inductor")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_greedy_tokens_of_the_trained_checkpoint(
    compiler: str, continuations: list[Continuation], trained: Path
) -> None:
    runner = open_runner(trained, compiler, dtype="auto")
    assert runner.spec.dtype is torch.bfloat16
    ours = forced_logits(runner, continuations)
    ties = check_greedy(ours, continuations)
    # Rounding affects transformers as much; a mistake would add to it.
    assert error(ours, continuations) <= SLACK * error([each.logits for each in continuations], continuations)

    # The generation loop gives the same text, up to the first tie.
    made: list[list[int]] = [[] for _ in continuations]
    params = hal.SamplingParams(max_new_tokens=NEW_TOKENS)
    for token in hal.generate(runner, [each.prompt for each in continuations], params):
        made[token.prompt_index].append(token.token_id)
    for row, each in enumerate(continuations):
        agreed = min((step for place, step in ties if place == row), default=NEW_TOKENS)
        assert made[row][:agreed] == each.tokens[:agreed]
        assert len(made[row]) == NEW_TOKENS
