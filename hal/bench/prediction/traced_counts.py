"""What a traced step launches, moves and exchanges, as expressions of the sizes of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.collective_calls import CollectiveCall, collective_calls, whole_without_fusion
from hal.compile.fx.alias_analysis import may_alias_input
from hal.compile.fx.clean import CLEANUPS
from hal.compile.fx.symbolic_sizes import value
from hal.compile.pass_manager import PassManager
from hal.compile.rewrite.rewrite import derived
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.nn import CausalLM
from hal.step import LAST, NONE
from hal.step.state import StateSpec, canonical_states


@attrs.frozen
class TracedCounts:
    """The counts of a traced step.

    Attributes:
        launches: kernels, collectives excluded.
        moved: bytes of activations that they read and write.
        calls: the collectives.
        symbols: the symbol of each axis.
    """

    launches: int
    moved: Any
    calls: tuple[CollectiveCall, ...]
    symbols: Mapping[str, Any]

    def minus(self, other: TracedCounts) -> TracedCounts:
        """Return what this step does beyond ``other``, a step with fewer layers."""
        known = [each.of for each in other.calls]
        more = tuple(each for each in self.calls if each.of not in known)
        names = {other.symbols[name]: symbol for name, symbol in self.symbols.items()}
        return TracedCounts(self.launches - other.launches, self.moved - other.moved.subs(names), more, self.symbols)

    def at(self, expression: Any, tokens: int, sequences: int) -> int:
        """Return the value of an expression for a step of these sizes."""
        sizes = {"tokens": tokens, "sequences": sequences}
        known = {self.symbols[name]: size for name, size in sizes.items()}
        return expression if isinstance(expression, int) else int(expression.subs(known))


def traced_counts(model: CausalLM, fused: Sequence[str]) -> TracedCounts:
    """Trace a step of any size, and rewrite it with the fused operations."""
    spec = StateSpec(tuple(model.states), next(model.parameters()).dtype, 2, 16, num_slots=2)
    states = canonical_states(spec, torch.device("meta"))
    # A model calls no fused operation, so that each collective is by itself before the rewrites.
    whole = whole_without_fusion() | set(fused)
    rows = LAST if model.has_logits else NONE
    step = trace_step(model, states, StepSizes(None), whole=whole, decompose=False, rows=rows)
    calls = tuple(collective_calls(step, model))
    manager = PassManager(step.graph, step.mode)
    for rewrite in derived([ops.operation(name) for name in fused]):
        manager.add(rewrite)
    for clean in CLEANUPS:
        manager.add(clean)
    manager.apply()
    launched = [_moved(node, step) for node in _launched(step.graph.graph)]
    symbols = {name: size.node._expr for name, size in step.sizes.items() if not isinstance(size, int)}
    return TracedCounts(len(launched), sum(launched), calls, symbols)


def _launched(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the calls that compute: those that return no view, and are no collective."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operation = ops.operation_of_node(node.target)
        if operation is not None and operation.collective:
            continue
        if operation is not None or not may_alias_input(node):
            yield node


def _moved(node: fx.Node, step: TracedStep) -> Any:
    """Return the bytes of the activations that a call reads and writes; weights and states are counted elsewhere."""
    inputs = [each for each in step.graph.graph.nodes if each.op == "placeholder"]
    fixed = set(inputs[len(step.fields) :])
    given = [value(each) for each in node.all_input_nodes if each not in fixed]
    results = value(node)
    returned = results if isinstance(results, tuple | list) else [results]
    return sum(_nbytes(each) for each in [*given, *returned] if isinstance(each, Tensor))


def _nbytes(tensor: Tensor) -> Any:
    if not tensor.is_floating_point():
        return 0
    count: Any = tensor.numel()
    return (count if isinstance(count, int) else count.node.expr) * tensor.dtype.itemsize
