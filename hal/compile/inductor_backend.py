"""Compilation with Inductor: of a traced step, and of a graph of Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch._inductor.config as settings
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from hal import ops
from hal.compile.fx.make_graph import TRACING, make_graph
from hal.compile.trace import TracedStep, kept_or_traced
from hal.drivers.compiler import Outputs
from hal.errors import CompileError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel


def compile_step(step: TracedStep) -> Callable[[list[Tensor]], Outputs]:
    """Compile a step.

    Returns:
        A function from a batch's tensors, in the order of its fields, to what the step returns.

    Raises:
        CompileError: Inductor failed, for instance without a C++ compiler.
    """
    sizes = _add_sizes(step)
    compiled = _compile(step.graph, step.fakes, step.mode, 'use the compiler "graph", which needs no C++ compiler')
    fixed = step.fixed

    def run(batch: list[Tensor]) -> Outputs:
        return tuple(compiled([*(each(batch) for each in sizes), *batch, *fixed]))

    return run


def _add_sizes(step: TracedStep) -> list[Callable[[list[Tensor]], Tensor]]:
    """Add an input for each symbol of which the batch's sizes are multiples only, such as an encoder's tokens of rows.

    Inductor takes the values of symbols from inputs that have them as sizes.

    Returns:
        For each added input, a function that makes it of the batch's tensors. They precede the other inputs.
    """
    graph = step.graph.graph
    shapes: list[Sequence[Any]] = [fake.shape for fake in step.fakes[: len(step.fields)]]
    sizes = [(index, axis, size) for index, shape in enumerate(shapes) for axis, size in enumerate(shape)]
    symbolic = [each for each in sizes if isinstance(each[2], torch.SymInt)]
    whole = {size.node.expr for *_, size in symbolic if size.node.expr.is_Symbol}
    made: dict[Any, Callable[[list[Tensor]], Tensor]] = {}
    for index, axis, size in symbolic:
        factor, symbol = size.node.expr.as_coeff_Mul()
        if symbol.is_Symbol and symbol not in whole and symbol not in made:
            made[symbol] = partial(_of_size, index, axis, int(factor))
            with step.mode, graph.inserting_before(next(iter(graph.nodes))):
                graph.placeholder(str(symbol)).meta["val"] = torch.empty(size // int(factor))
    return list(reversed(made.values()))


def _of_size(index: int, axis: int, factor: int, batch: list[Tensor]) -> Tensor:
    return torch.empty(batch[index].shape[axis] // factor)


def compile_graph(module: fx.GraphModule, mode: FakeTensorMode, opaque: Collection[str]) -> Callable[..., Any]:
    """Compile a rewritten graph of Dynamo for inference.

    Args:
        module: the graph.
        mode: the mode of its fake tensors.
        opaque: operations that stay calls of the backend's kernels. The bodies of the others are compiled.

    Returns:
        A function of the graph's inputs.

    Raises:
        CompileError: the graph writes to a tensor in place, or Inductor failed.
    """
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    graph = make_graph(_Bodies(module, opaque).run, inputs, mode, select_decomp_table())
    for node in graph.graph.nodes:
        # Inductor expects a functional graph here, and would lose a write through a view.
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise CompileError(f"the graph writes in place, with {node.target}", _WITHOUT_INDUCTOR)
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # The graph may have constants.
    try:
        compiled = _compile(graph, inputs, mode, _WITHOUT_INDUCTOR)
    finally:
        mode.allow_non_fake_inputs = allowed
    return lambda *args: compiled(list(args))


_WITHOUT_INDUCTOR = 'leave "compiler" out of the options of torch.compile'


class _Bodies(fx.Interpreter):
    """Runs a graph with the bodies of its operations, except some."""

    def __init__(self, module: fx.GraphModule, opaque: Collection[str]) -> None:
        super().__init__(module)
        self._opaque = opaque

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        operation = ops.operation_of_node(target)
        if operation is None:
            return super().call_function(target, args, kwargs)
        return self._meaning(operation)(*operation.node_form.pack(args, kwargs))

    def _meaning(self, operation: Operation) -> Kernel:
        return kept_or_traced(operation, self._opaque, self._meaning)


def _compile(graph: fx.GraphModule, fakes: list[Any], mode: FakeTensorMode, otherwise: str) -> Callable[..., Any]:
    try:
        with TRACING, torch.no_grad(), tracing(TracingContext(mode)), settings.patch(size_asserts=False):
            compiled: Any = compile_fx_inner(graph, fakes)
    except Exception as error:
        raise CompileError(f"Inductor failed: {error}", f"install g++, or {otherwise}") from error
    return compiled  # type: ignore[no-any-return]
