"""Measures generation through vLLM against hal.generate: 32 prompts, 64 new tokens each. Prints a JSON object.

Run it where vLLM is installed: ``hal emulate -- python tools/benchmarks/vllm_speed.py [checkpoint]``, without
``hal emulate --`` if torch_npu is not installed. Both sides use the CPU backend and the compiler ``graph``, with the
same captured sizes, in one process, in turns, on one thread unless ``OMP_NUM_THREADS`` is set. ``random`` in place of a
checkpoint writes one of 8 layers with hidden size 512 and a vocabulary of 32,000, whose steps are longer.

``vllm_s`` and ``hal_s`` are medians of seconds, ``ratio`` that of the turns' ratios, and ``cpu_ratio`` the same of CPU
seconds, which other processes disturb less. ``vllm_tokens_s`` is new tokens per second, and ``hal_step_ms`` the mean
milliseconds in ``Runner.step`` under vLLM. The others are medians of CPU microseconds per step, of all threads:
``hal_step_us`` in ``Runner.step`` under vLLM and ``hal_alone_step_us`` under hal.generate, ``generate_us`` the rest of
hal.generate, ``adapter_us`` in the worker without ``Runner.step`` and vLLM's sampler, ``sampler_us`` in that, and
``vllm_us`` the rest: vLLM's scheduler, engine and output. A CPU does not need ``--async``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "HAL_VLLM": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.checkpoints import LARGE, random_checkpoint
from vllm import LLM, SamplingParams

import hal
from hal.engines.vllm.worker import HalWorker

PROMPTS, NEW, LONGEST = 32, 64, 512
HAL = {"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": [1, 8, 16, 32]}}
SPENT: Counter[str] = Counter()
"""CPU seconds of this process by part, and the steps."""


def timed(part: str, run: Callable[..., Any], *arguments: Any) -> Any:
    """Run something, and count its CPU seconds."""
    began = time.process_time()
    try:
        return run(*arguments)
    finally:
        SPENT[part] += time.process_time() - began


class TimedRunner(hal.Runner):
    """Counts the time of steps."""

    def step(self, *arguments: Any) -> Any:
        """Run the step."""
        SPENT["steps"] += 1
        began = time.perf_counter()
        try:
            return timed("runner", super().step, *arguments)
        finally:
            SPENT["step"] += time.perf_counter() - began


class TimedWorker(HalWorker):
    """Counts the time of what vLLM asks for."""

    runner_type = TimedRunner
    began = 0.0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Count the time of the sampler."""
        super().initialize_from_config(kv_cache_config)
        sampler = self.model_runner.sampler
        sampler.register_forward_pre_hook(self.sampling)
        sampler.register_forward_hook(self.sampled)

    def sampling(self, *_: object) -> None:
        """Begin to count the sampler's time."""
        self.began = time.process_time()

    def sampled(self, *_: object) -> None:
        """Count the sampler's time."""
        SPENT["sampler"] += time.process_time() - self.began

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the step."""
        return timed("worker", super().execute_model, scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Choose the tokens."""
        return timed("worker", super().sample_tokens, grammar_output)


def measured(side: Callable[[], object]) -> dict[str, float]:
    """Return the seconds and CPU seconds of a run, and the CPU microseconds of its parts in a step."""
    SPENT.clear()
    began = time.perf_counter()
    timed("all", side)
    found = {"seconds": time.perf_counter() - began, "cpu": SPENT["all"]}
    return found | {name: 1e6 * value / SPENT["steps"] for name, value in SPENT.items()}


def main() -> None:
    """Measure, or profile."""
    parser = argparse.ArgumentParser()
    tiny = Path(__file__).parents[2] / "checkpoints" / "tiny-python"
    parser.add_argument("checkpoint", nargs="?", default=str(tiny))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--profile", action="store_true", help="print where vLLM's time goes instead")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="vLLM's asynchronous scheduling")
    options = parser.parse_args()
    if options.checkpoint != "random":
        run(options.checkpoint, options.turns or 15, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "random", **LARGE, dtype=options.dtype)
        run(str(checkpoint), options.turns or 5, options)


def run(checkpoint: str, turns: int, options: argparse.Namespace) -> None:
    """Measure or profile a checkpoint."""
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 4000) for _ in range(draw.randint(8, 64))] for _ in range(options.prompts)]
    engine = LLM(
        model=checkpoint,
        dtype=options.dtype,
        max_model_len=LONGEST,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        num_gpu_blocks_override=1 + PROMPTS * LONGEST // 16,
        block_size=16,
        disable_log_stats=True,
        worker_cls=f"{__name__}.TimedWorker",
        additional_config={"hal": HAL},
        async_scheduling=options.asynchronous,
        skip_tokenizer_init=True,
    )
    backend = hal.open({**HAL, "dtype": options.dtype, "cache": {"num_tokens": PROMPTS * LONGEST, "block_size": 16}})
    runner = TimedRunner(hal.load_model(checkpoint, backend), backend, max_sequences=PROMPTS, max_length=LONGEST)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts]

    def through_vllm() -> list[list[int]]:
        return [[*each.outputs[0].token_ids] for each in engine.generate(given, params, use_tqdm=False)]

    def by_hal() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for token in hal.generate(runner, prompts, hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt_index].append(token.token_id)
        return found

    assert through_vllm() == by_hal(), "the tokens differ"  # also warms both up
    if options.profile:
        with cProfile.Profile(time.process_time) as profile:
            through_vllm()
        pstats.Stats(profile).sort_stats("cumtime").print_stats(120)
        return
    taken = []
    for turn in range(turns):
        sides = [through_vllm, by_hal] if turn % 2 else [by_hal, through_vllm]
        taken.append({side: measured(side) for side in sides})

    def median(of: Callable[[dict[str, float], dict[str, float]], float], digits: int = 0) -> float:
        return round(statistics.median(of(each[through_vllm], each[by_hal]) for each in taken), digits)

    figures = {
        "vllm_tokens_s": round(
            options.prompts * NEW / statistics.median(each[through_vllm]["seconds"] for each in taken), 1
        ),
        "hal_step_ms": median(lambda vllm, _: vllm["step"] / 1e3, 2),
        "vllm_s": median(lambda vllm, _: vllm["seconds"], 4),
        "hal_s": median(lambda _, alone: alone["seconds"], 4),
        "ratio": median(lambda vllm, alone: vllm["seconds"] / alone["seconds"], 3),
        "cpu_ratio": median(lambda vllm, alone: vllm["cpu"] / alone["cpu"], 3),
        "cpu_ratios": [round(each[through_vllm]["cpu"] / each[by_hal]["cpu"], 3) for each in taken],
        "hal_step_us": median(lambda vllm, _: vllm["runner"]),
        "hal_alone_step_us": median(lambda _, alone: alone["runner"]),
        "generate_us": median(lambda _, alone: alone["all"] - alone["runner"]),
        "adapter_us": median(lambda vllm, _: vllm["worker"] - vllm["runner"] - vllm["sampler"]),
        "sampler_us": median(lambda vllm, _: vllm["sampler"]),
        "vllm_us": median(lambda vllm, _: vllm["all"] - vllm["worker"]),
    }
    print(json.dumps(figures))  # noqa: T201


if __name__ == "__main__":
    main()
