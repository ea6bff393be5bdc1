"""Generates with a model whose layers have windows through vLLM, in a small cache, and compares with hal.generate.

The argument is JSON with ``checkpoint``, ``hal`` (hal's configuration), ``dtype``, ``block`` (tokens per block),
``blocks`` (their number), ``prompt`` and ``new`` (tokens), ``longest`` (the model's most tokens), ``seed``, and
``out``, the file for the result. Before each step, the dummy block, which vLLM names in the place of blocks before the
window, is filled with NaN. With windows, one prompt is longer than the cache.
test_vllm_families.py runs it in another process.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from vllm import LLM, SamplingParams
from vllm_counts import resumed

import hal
from hal.engines.vllm.worker import HalWorker
from hal.step.fields import DUMMY_BLOCK

REQUESTS = 16
FOUND: Counter[str] = Counter()


class WindowWorker(HalWorker):
    """Fills the dummy block, and counts steps, their rows, the most rows of one, resumed requests and dummy blocks."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Fill, count, and run the step."""
        with torch.inference_mode():
            for _, state in self.model_runner.runner.states.tensors():
                state[DUMMY_BLOCK].fill_(float("nan"))
        FOUND["steps"] += 1
        FOUND["rows"] += len(scheduler_output.num_scheduled_tokens)
        FOUND["together"] = max(FOUND["together"], len(scheduler_output.num_scheduled_tokens))
        FOUND["resumed"] += resumed(scheduler_output)
        new = scheduler_output.scheduled_new_reqs
        FOUND["dummies"] += sum(each.block_ids[0].count(DUMMY_BLOCK) for each in new)
        return super().execute_model(scheduler_output)


class KeepingWorker(WindowWorker):
    """Declares no windows, so that vLLM keeps all blocks."""

    def get_kv_cache_spec(self) -> Mapping[str, Any]:
        """Return the specification of the layers as if they had no windows."""
        states = self.model.states
        self.model.states = [
            {name: attrs.evolve(each, window=None) for name, each in layer.items()} for layer in states
        ]
        try:
            return super().get_kv_cache_spec()
        finally:
            self.model.states = states


def main() -> None:
    """Compare, and write what was found."""
    asked = json.loads(sys.argv[1])
    draw = random.Random(asked["seed"])
    shared = [draw.randrange(5, 90) for _ in range(asked["prompt"])]
    prompts = [shared[: draw.randint(asked["prompt"] // 2, asked["prompt"])] for _ in range(REQUESTS)]
    prompts += [shared + [draw.randrange(5, 90) for _ in range(5)]]
    long = [draw.randrange(5, 90) for _ in range(asked["longest"] - asked["new"])]
    assert len(long) > asked["block"] * asked["blocks"]
    backend = hal.open({**asked["hal"], "dtype": asked["dtype"], "cache": {"num_tokens": 32768}})
    runner = hal.Runner(hal.load_model(asked["checkpoint"], backend), backend)
    expected: list[list[int]] = [[] for _ in [*prompts, long]]
    for token in hal.generate(runner, [*prompts, long], hal.SamplingParams(max_new_tokens=asked["new"])):
        expected[token.prompt_index].append(token.token_id)
    params = SamplingParams(temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
    given: Any = [{"prompt_token_ids": each} for each in prompts]
    result: dict[str, Any] = {"wrong": []}
    for worker in (WindowWorker, KeepingWorker):
        FOUND.clear()
        engine = LLM(
            model=asked["checkpoint"],
            block_size=asked["block"],
            dtype=asked["dtype"],
            skip_tokenizer_init=True,
            max_num_seqs=16,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=asked["blocks"],
            worker_cls=f"{__name__}.{worker.__name__}",
            additional_config={"hal": asked["hal"]},
            max_model_len=asked["longest"] if worker is WindowWorker else asked["prompt"] + asked["new"] + 8,
        )
        found = engine.generate(given, params, use_tqdm=False)
        result[worker.__name__] = dict(FOUND)
        if worker is WindowWorker:
            found += engine.generate([{"prompt_token_ids": long}], params, use_tqdm=False)
        result["wrong"] += [
            f"{worker.__name__}, prompt {index}: {[*output.outputs[0].token_ids]} and {wanted}"
            for index, (output, wanted) in enumerate(zip(found, expected[: len(found)], strict=True))
            if [*output.outputs[0].token_ids] != wanted
        ]
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")
