"""Compilation of a traced step with Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as settings
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner

from hal.compile.fx.make_graph import TRACING
from hal.compile.trace import TracedStep
from hal.errors import CompileError


def compile_step(step: TracedStep) -> Callable[[list[Tensor]], Tensor]:
    """Compile a step.

    Returns:
        A function from a batch's tensors, in the order of its fields, to logits.

    Raises:
        CompileError: Inductor failed, for instance without a C++ compiler.
    """
    try:
        with TRACING, torch.no_grad(), tracing(TracingContext(step.mode)), settings.patch(size_asserts=False):
            compiled: Any = compile_fx_inner(step.graph, step.fakes)
    except Exception as error:
        raise CompileError(
            f"Inductor failed: {error}", 'install g++, or use the compiler "graph", which needs no C++ compiler'
        ) from error
    fixed = step.fixed

    def run(batch: list[Tensor]) -> Tensor:
        (logits,) = compiled([*batch, *fixed])
        result: Tensor = logits
        return result

    return run
