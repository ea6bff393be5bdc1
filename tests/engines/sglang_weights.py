"""Replaces the weights of a running SGLang, and compares its tokens before and after with hal.generate's.

The argument is JSON with ``first`` and ``second``, two checkpoints of one model, and ``out``, the file for the result.
test_sglang.py runs it in a separate process, and SGLang's scheduler in another.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sglang
from safetensors.torch import load_file
from torch import Tensor

import hal

HAL: Mapping[str, Any] = {"backend": "cpu", "compilation": {"compiler": "graph"}}
NEW = 12


def expected(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy continuations of hal.generate."""
    with hal.open({**HAL, "dtype": "float32", "cache": {"num_tokens": 4096}}) as backend:
        runner = hal.Runner(hal.load_model(folder, backend), backend)
        found: list[list[int]] = [[] for _ in prompts]
        for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt_index].append(token.token_id)
    return found


def tensors(folder: str) -> list[tuple[str, Tensor]]:
    """Return the tensors of a checkpoint."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return [item for path in files for item in load_file(path).items()]


def main() -> None:
    """Replace the weights from files, then from tensors, and write what was found."""
    asked = json.loads(sys.argv[1])
    first, second = asked["first"], asked["second"]
    draw = random.Random(0)
    prompts = [[draw.randrange(5, 200) for _ in range(length)] for length in (70, 9, 130)]
    wanted = {folder: expected(folder, prompts) for folder in (first, second)}
    engine = sglang.Engine(
        model_path=first,
        dtype="float32",
        context_length=512,
        max_total_tokens=1024,
        max_running_requests=4,
        chunked_prefill_size=128,
        log_level="warning",
        json_model_override_args=json.dumps({"hal": HAL}),
    )
    steps: list[dict[str, Any]] = []

    def run(name: str, folder: str, updated: bool | None = None) -> None:
        params = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
        found: Any = engine.generate(input_ids=prompts, sampling_params=params)
        steps.append(
            {
                "name": name,
                "updated": updated,
                "equal": [each["output_ids"] for each in found] == wanted[folder],
                "cached": sum(each["meta_info"]["cached_tokens"] for each in found),
            }
        )

    def updated(answer: Any) -> bool:
        success, message, *_ = answer
        if not success and "the cache was not flushed" in message:  # SGLang has not removed finished requests yet.
            time.sleep(2)
            success = engine.flush_cache().success
        return bool(success)

    run("loaded", first)
    run("again", first)
    time.sleep(1)
    run("from disk", second, updated(engine.update_weights_from_disk(second)))
    time.sleep(1)
    engine.begin_weight_update()
    changed = updated(engine.update_weights_from_tensor(tensors(first)))
    engine.end_weight_update()
    run("from tensors", first, changed)
    engine.shutdown()
    result = {"steps": steps, "different": wanted[first] != wanted[second]}
    Path(asked["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
