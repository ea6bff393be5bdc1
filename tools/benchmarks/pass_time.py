"""Measures the time of rewriting. Run in a subprocess; prints a JSON object.

A Qwen3 of narrow layers, as a decode step for any batch size, with 16, 32 and 64 layers. Figures are seconds of CPU
time by name and depth, the best of three runs, each on a new copy of the traced graph: ``trace`` (once); ``hal``,
normalization and five rewrites; ``hal_rewriting``, the rewrites alone; ``hal_add_norm``, normalization and the rewrite
of an addition followed by a norm; and that rewrite on the same graph with ``torch.fx.replace_pattern``
(``fx_add_norm``) and with Inductor's pattern matcher (``inductor_add_norm``). ``fused`` is the number of sites at which
each applied it.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from hal.models.qwen3 import Qwen3ForCausalLM
from torch import Tensor, fx
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

import hal
from hal import ops
from hal.compile.pass_manager import PassManager
from hal.compile.rewrite.rewrite import of_operation
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.step import StateSpec
from hal.step.state import canonical_states

DEPTHS, ROUNDS = (16, 32, 64), 3
REWRITES = (
    "split_qkv_rmsnorm_rope_cache",
    "split_qkv_rmsnorm_rope",
    "add_rms_norm_quantize",
    "add_rms_norm",
    "silu_and_mul_quantize",
)
HIDDEN, EPS = 64, 1e-6


def traced(layers: int) -> TracedStep:
    model = Qwen3ForCausalLM.from_config(
        {
            "vocab_size": 64,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 512,
            "rms_norm_eps": EPS,
        }
    )
    spec = StateSpec(tuple(model.states), torch.float32, num_blocks=8, block_size=16)
    states = canonical_states(spec, torch.device("cpu"))
    return trace_step(model, states, StepSizes(4), whole=ops.catalogue(), decompose=False)


def copied(step: TracedStep) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(step.graph.graph, {}))
    return fx.GraphModule(step.graph, graph)


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def pattern(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.ops.aten.add.Tensor(x, residual)
    return torch.ops.hal.rms_norm.default(hidden, weight, EPS), hidden


def replacement(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normed, hidden = torch.ops.hal.add_rms_norm.default(x, residual, weight, EPS)
    return normed, hidden


def by_hal(step: TracedStep, names: tuple[str, ...]) -> Any:
    manager = PassManager(copied(step), step.mode)
    for name in names:
        manager.add(of_operation(ops.operation(name)))  # Checks and traces the rewrites, once per process.
    return lambda: manager.apply()


def by_fx(step: TracedStep) -> Any:
    graph = copied(step)
    return lambda: torch.fx.replace_pattern(graph, pattern, replacement)


def by_inductor(step: TracedStep) -> Any:
    graph, passes = copied(step), PatternMatcherPass()
    examples = [torch.empty(4, HIDDEN), torch.empty(4, HIDDEN), torch.empty(HIDDEN)]
    register_replacement(pattern, replacement, examples, fwd_only, [passes], skip_duplicates=True)
    return lambda: passes.apply(graph)


def main() -> None:
    torch.set_num_threads(1)
    hal.open("cpu")
    figures: dict[str, Any] = {}

    def note(name: str, layers: int, value: Any) -> None:
        known = figures.setdefault(name, {})
        if str(layers) not in known or value < known[str(layers)]:
            known[str(layers)] = value

    for layers in DEPTHS:
        spent, step = seconds(functools.partial(traced, layers))
        note("trace", layers, spent)
        for _ in range(ROUNDS):
            spent, report = seconds(by_hal(step, REWRITES))
            note("hal", layers, spent)
            note("hal_rewriting", layers, sum(each.seconds for each in report.passes))
            spent, report = seconds(by_hal(step, REWRITES[3:4]))
            note("hal_add_norm", layers, spent)
            spent, replaced = seconds(by_fx(step))
            note("fx_add_norm", layers, spent)
            spent, count = seconds(by_inductor(step))
            note("inductor_add_norm", layers, spent)
        fused = {"hal": len(report["add_rms_norm"].matches), "fx": len(replaced), "inductor": count}
        figures.setdefault("fused", {})[str(layers)] = fused
    sys.stdout.write(json.dumps(figures))


if __name__ == "__main__":
    main()
