"""Measures generation through vLLM against hal.generate: 32 prompts, 64 new tokens each. Prints a JSON object.

Run it where vLLM is installed: ``hal emulate -- python tests/benchmarks/vllm_speed.py [checkpoint]``, without
``hal emulate --`` if torch_npu is not installed. Both sides use the CPU backend and the compiler ``graph``, with the
same captured sizes, in one process, on one thread, in turns. ``vllm_s`` and ``hal_s`` are medians of seconds, ``ratio``
that of the turns' ratios, and ``cpu_ratio`` the same of CPU seconds, which other processes disturb less. With
``--profile``, it prints where vLLM's time goes instead.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ |= {"HAL_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}  # fmt: skip

from vllm import LLM, SamplingParams

import hal

PROMPTS, NEW, TURNS, LONGEST = 32, 64, 7, 512
HAL = {"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": [1, 8, 16, 32]}}


def timed(generate: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a run."""
    began, worked = time.perf_counter(), time.process_time()
    generate()
    return time.perf_counter() - began, time.process_time() - worked


def main() -> None:
    """Measure, or profile."""
    arguments = [each for each in sys.argv[1:] if each != "--profile"]
    checkpoint = arguments[0] if arguments else str(Path(__file__).parents[2] / "checkpoints" / "tiny-python")
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 4000) for _ in range(draw.randint(8, 64))] for _ in range(PROMPTS)]
    engine = LLM(
        model=checkpoint, dtype="float32", max_model_len=LONGEST, max_num_seqs=PROMPTS, max_num_batched_tokens=2048,
        enable_prefix_caching=False, num_gpu_blocks_override=1 + PROMPTS * LONGEST // 16, block_size=16,
        disable_log_stats=True, additional_config={"hal": HAL},
    )  # fmt: skip
    backend = hal.open({**HAL, "dtype": "float32", "cache": {"num_tokens": PROMPTS * LONGEST, "block_size": 16}})
    runner = hal.Runner(hal.load_model(checkpoint, backend), backend, max_sequences=PROMPTS, max_length=LONGEST)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts]

    def through_vllm() -> list[list[int]]:
        return [[*each.outputs[0].token_ids] for each in engine.generate(given, params, use_tqdm=False)]

    def by_hal() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt].append(token.token_id)
        return found

    assert through_vllm() == by_hal(), "the tokens differ"  # also warms both up
    if "--profile" in sys.argv:
        with cProfile.Profile() as profile:
            through_vllm()
        pstats.Stats(profile).sort_stats("cumtime").print_stats(70)
        return
    turns = []
    for turn in range(TURNS):
        sides = [through_vllm, by_hal] if turn % 2 else [by_hal, through_vllm]
        took = {side: timed(side) for side in sides}
        turns.append((*took[through_vllm], *took[by_hal]))
    print(json.dumps({  # noqa: T201
        "vllm_s": round(statistics.median(each[0] for each in turns), 4),
        "hal_s": round(statistics.median(each[2] for each in turns), 4),
        "ratio": round(statistics.median(each[0] / each[2] for each in turns), 3),
        "cpu_ratio": round(statistics.median(each[1] / each[3] for each in turns), 3),
        "cpu_ratios": [round(each[1] / each[3], 3) for each in turns],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
