"""A model of transformers on the CPU in six ways, by turns. Run it in a fresh process.

- ``eager``: transformers as it is.
- ``inductor``: ``torch.compile(model)``.
- ``hal``: ``torch.compile(model, backend="hal")``.
- ``both``: the same with ``options={"compiler": "inductor"}``.
- ``use``: ``hal.engines.transformers.use(model)``, eagerly.
- ``own``: hal's own model of the same weights, with the compiler ``graph``.

Each decodes a token of every sequence after 128 cached ones, or reads a prompt of 128 tokens. Prints a JSON object for
each step: the median milliseconds of each way (``median_ms``), and how many times as fast as ``eager`` it is, as the
median of the rounds' ratios (``speedup``). Arguments: families, ``Qwen3`` and ``Qwen3Moe`` by default; ``--bfloat16``;
``--threads N``; and ``--cpu-time``, to measure the processor time of one thread, which other processes disturb less.
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hal  # isort: skip  # imports torch without vendors' extensions

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.tiny_transformers import model_of, prompts_of

from hal.bench.timing import interleave
from hal.bench.transformers_side import only_imported_extensions
from hal.bench.workload import Contender

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "layers": 4,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
CACHED, ROUNDS = 128, 15
STEPS = (("decode", 1), ("decode", 8), ("prefill", 1))


class Steps:
    """The steps of one way to run transformers' model."""

    def __init__(self, model: Any, call: Callable[..., Any], prompts: list[list[int]]) -> None:
        self._call, self._tokens = call, torch.tensor(prompts)
        self._cache = model(self._tokens, use_cache=True).cache
        self._kept = [(each.keys, each.values) for each in self._cache.layers]
        self._next = torch.tensor([[1 + row] for row in range(len(prompts))])

    def decode(self) -> torch.Tensor:
        # A step replaces the cache's tensors by longer ones. Cropping these would leave gaps, which generate never has.
        for layer, kept in zip(self._cache.layers, self._kept, strict=True):
            layer.keys, layer.values = kept
        logits: torch.Tensor = self._call(self._next, cache=self._cache, use_cache=True).logits[:, -1]
        return logits

    def prefill(self) -> torch.Tensor:
        output = self._call(self._tokens, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]  # type: ignore[no-any-return]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in configurations."""
    return str(dtype).removeprefix("torch.")


def own_step(runner: hal.Runner, kind: str, prompts: list[list[int]]) -> Callable[[], torch.Tensor]:
    """Return a step of hal's own model."""
    each = runner.spec.blocks_for(CACHED + 1)
    blocks = [list(range(1 + row * each, 1 + (row + 1) * each)) for row in range(len(prompts))]
    prompt = runner.batch(prompts, blocks)
    runner.step(prompt)
    tokens = [[1 + row] for row in range(len(prompts))]
    if kind == "prefill":
        return lambda: runner.step(runner.batch(prompts, blocks)).logits
    return lambda: runner.step(runner.batch(tokens, blocks, cached=[CACHED] * len(prompts))).logits


def measure(family: str, kind: str, batch: int, dtype: torch.dtype, clock: Callable[[], float]) -> dict[str, Any]:
    """Return the medians of one step."""
    from hal.engines.transformers import use

    torch.compiler.reset()
    sizes = SIZES | (EXPERTS if family == "Qwen3Moe" else {})
    with torch.inference_mode(False):  # Projections are merged only if changes of their parameters can be noticed.
        model = model_of(family, dtype=dtype, **sizes)
        other = copy.deepcopy(model)
    prompts = prompts_of(*[CACHED] * batch)
    ways = {
        "eager": Steps(model, model, prompts),
        "inductor": Steps(model, torch.compile(model), prompts),
        "hal": Steps(model, torch.compile(model, backend="hal"), prompts),
        "both": Steps(model, torch.compile(model, backend="hal", options={"compiler": "inductor"}), prompts),
        "use": Steps(other, other, prompts),
    }
    calls = {name: getattr(each, kind) for name, each in ways.items()}
    with tempfile.TemporaryDirectory() as folder, use(other):
        model.save_pretrained(folder)
        backend = hal.open(
            {
                "backend": "cpu",
                "dtype": name_of(dtype),
                "cache": {"num_tokens": (CACHED + 64) * batch},
                "compilation": {"compiler": "graph", "capture_sizes": [batch]},
            }
        )
        with hal.Runner(hal.load_model(Path(folder), backend), backend) as runner:
            calls["own"] = own_step(runner, kind, prompts)
            expected, tolerance = calls["eager"](), 1e-3 if dtype is torch.float32 else 0.1
            for call in calls.values():
                # The mean: in 16 bits, single logits of a mixture of experts differ by more.
                difference = (call().float() - expected.float()).abs().mean() / expected.float().abs().mean()
                assert difference < tolerance, f"{family} {kind}: differs by {difference:.2g} of the mean logit"
            contenders = [Contender(name, call, lambda: None) for name, call in calls.items()]
            seconds = interleave(contenders, ROUNDS, warm=True, synchronize=lambda: None, clock=clock)
    median = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "family": family,
        "step": kind,
        "batch": batch,
        "dtype": name_of(dtype),
        "median_ms": {name: round(each * 1e3, 2) for name, each in median.items()},
        "speedup": {
            name: round(statistics.median(base / own for base, own in zip(seconds["eager"], each, strict=True)), 2)
            for name, each in seconds.items()
        },
    }


def main() -> None:
    arguments = sys.argv[1:]
    clock = time.process_time if "--cpu-time" in arguments else time.perf_counter
    threads = int(arguments[arguments.index("--threads") + 1]) if "--threads" in arguments else 1
    torch.set_num_threads(1 if "--cpu-time" in arguments else threads)
    dtype = torch.bfloat16 if "--bfloat16" in arguments else torch.float32
    families = [each for each in arguments if each[0].isupper()] or ["Qwen3", "Qwen3Moe"]
    logging.getLogger("hal").setLevel("ERROR")
    hal.open({"backend": "cpu", "dtype": name_of(dtype)})
    with only_imported_extensions(), torch.inference_mode():
        for family in families:
            for kind, batch in STEPS:
                sys.stdout.write(json.dumps(measure(family, kind, batch, dtype, clock)) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
