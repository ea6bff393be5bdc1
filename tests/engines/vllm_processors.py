"""Runs requests with a custom logits processor through vLLM, and compares their tokens with hal.generate's.

The processor has the interface of the model runner that ``VLLM_USE_V2_MODEL_RUNNER`` chooses. The argument is JSON with
``checkpoint``, ``hal`` (hal's configuration), ``vllm`` (further arguments of ``vllm.LLM``), ``seed``, ``requests``, and
``out``, the file for the result. test_vllm_sampling.py runs it in a separate process.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams, envs
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

import hal

ASKED = "without_repeats"
"""The key of ``extra_args`` that asks for the processor."""


class FirstRunnersProcessor(AdapterLogitsProcessor):
    """Masks all tokens that a request has had, with the interface of the first model runner."""

    def is_argmax_invariant(self) -> bool:
        """Return False."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Tensor] | None:
        """Return what masks the tokens of a request that asks for it."""

        def masked(prompt: Sequence[int], outputs: Sequence[int], logits: Tensor) -> Tensor:
            logits[[*prompt, *outputs]] = -torch.inf
            return logits

        return masked if (params.extra_args or {}).get(ASKED) else None


class SecondRunnersProcessor(LogitsProcessor):
    """Masks all tokens that a request has had, with the interface of the second model runner."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states, self.asked = req_states, [False] * req_states.max_num_reqs

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Return whether the request asks for it."""
        self.asked[req_idx] = bool((sampling_params.extra_args or {}).get(ASKED))
        return self.asked[req_idx]

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Mask the tokens so far, and the drafted ones."""
        drafted: list[int] = []
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            total, place = int(self.states.total_len.gpu[slot]), int(ctx.expanded_local_pos[row])
            drafted = [*drafted, int(ctx.input_ids[row])] if place else []
            assert int(ctx.pos[row]) <= total - 1 + place
            assert place or int(ctx.input_ids[row]) == int(self.states.all_token_ids.gpu[slot, total - 1])
            assert 0 < self.states.prompt_len.np[slot] <= self.states.prefill_len.gpu[slot] <= total
            if self.asked[slot]:
                logits[row, self.states.all_token_ids.gpu[slot, :total].long()] = -torch.inf
                logits[row, drafted] = -torch.inf
        slots = dict.fromkeys(ctx.expanded_idx_mapping.tolist())
        assert [*slots] == ctx.idx_mapping.tolist() == ctx.idx_mapping_np.tolist()
        return logits


class WithoutRepeats:
    """The mask of a prompt for :class:`hal.SamplingParams`."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        self.prompt, self.vocab_size = prompt, vocab_size

    def __call__(self, generated: Sequence[int]) -> Tensor:
        """Return the tokens that neither the prompt nor the text has, as bits."""
        words = [-1] * ((self.vocab_size + 31) // 32)
        for token in {*self.prompt, *generated}:
            words[token // 32] &= ~(1 << (token % 32))
        return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def main() -> None:
    """Run the requests, compare, and write what was found."""
    from vllm_requests import CountingWorker

    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    vocabulary = json.loads((Path(asked["checkpoint"]) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = [[draw.randrange(5, vocabulary) for _ in range(draw.randint(1, 150))] for _ in range(asked["requests"])]
    masked = [draw.random() < 0.6 for _ in prompts]
    given = [
        SamplingParams(
            temperature=0.8 * (index % 2), seed=index, max_tokens=30, ignore_eos=True, extra_args={ASKED: each}
        )
        for index, each in enumerate(masked)
    ]
    engine = LLM(
        model=asked["checkpoint"],
        max_model_len=256,
        block_size=16,
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=40,
        logits_processors=[SecondRunnersProcessor if envs.VLLM_USE_V2_MODEL_RUNNER else FirstRunnersProcessor],
        worker_cls=f"{CountingWorker.__module__}.{CountingWorker.__name__}",
        disable_log_stats=False,
        additional_config={"hal": asked["hal"]},
        **asked["vllm"],
    )
    inputs: Any = [{"prompt_token_ids": each} for each in prompts]
    found = [[*each.outputs[0].token_ids] for each in engine.generate(inputs, given, use_tqdm=False)]
    (counts,) = engine.collective_rpc("counted")
    backend = hal.open({**asked["hal"], "dtype": "float32", "cache": {"num_tokens": 8192}})
    runner = hal.Runner(hal.load_model(asked["checkpoint"], backend), backend)
    wanted = [
        hal.SamplingParams(
            max_new_tokens=30,
            temperature=params.temperature,
            seed=params.seed,
            mask=WithoutRepeats(prompt, runner.model.vocab_size) if each else None,
        )
        for prompt, each, params in zip(prompts, masked, given, strict=True)
    ]
    expected: list[list[int]] = [[] for _ in prompts]
    for token in hal.generate(runner, prompts, wanted):
        expected[token.prompt_index].append(token.token_id)
    repeats = sum(len({*tokens}) < len(tokens) for tokens, each in zip(expected, masked, strict=True) if not each)
    wrong = [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    result = {"wrong": wrong, "masked": sum(masked), "repeats": repeats, "counts": counts}
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")
