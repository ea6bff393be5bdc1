"""Splitting of a step into pieces that can be captured and parts that run eagerly between them.

A piece can be captured for a number of tokens if every value that it reads is fixed, or has a shape that depends on
tokens only. The lengths and block tables of attention change shape between steps. A node is therefore captured unless
it is a splitting operation or depends on such an input. Eager parts receive one row per token of the batch, so a value
with tokens in another dimension than the first stays inside a piece.

Each segment computes the sizes that it needs again, from the tensors that have them. So a segment that needs only the
size of a value reads that value. In a piece, tokens are those that it was captured for: a node that computes with their
number, rather than giving its result a shape, is not captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hal import ops
from hal.compile.fx.alias_analysis import AliasAnalysis
from hal.compile.fx.symbolic_sizes import value
from hal.compile.lower import lower
from hal.compile.trace import TracedStep


@attrs.frozen
class Output:
    """A value that a segment outputs.

    Attributes:
        name: of the value.
        row: the other dimensions if the first one is the number of tokens, else None.
        dtype: of the value.
        last: the index of the last segment that reads the value or a view of it; the number of segments if the step
            returns it.
    """

    name: str
    row: tuple[int, ...] | None
    dtype: torch.dtype
    last: int


@attrs.frozen
class Segment:
    """A part of a step.

    Attributes:
        captured: whether it can be captured for a number of tokens.
        operations: names of its splitting operations.
        run: a function from the inputs to a tuple of the outputs.
        inputs: names of batch fields or of outputs of earlier segments.
        outputs: the values that later segments read or the step returns.
    """

    captured: bool
    operations: tuple[str, ...]
    run: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]


@attrs.frozen
class SplitStep:
    """A step as segments.

    Attributes:
        segments: in the order of execution.
        returned: the names of the returned values.
    """

    segments: tuple[Segment, ...]
    returned: tuple[str, ...]


def split(step: TracedStep, *, at: Collection[str]) -> SplitStep:
    """Split a rewritten step.

    Args:
        step: traced for steps of any shape; not changed.
        at: names of the splitting operations.
    """
    graph, batch_fields, fixed = step.graph.graph, list(step.fields), step.fixed
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders, batch_fields, strict=False))
    constants = dict(zip(placeholders[len(batch_fields) :], fixed, strict=True))
    constants |= {
        node: operator.attrgetter(node.target)(graph.owning_module) for node in graph.nodes if node.op == "get_attr"
    }
    rows = {node for node, name in names.items() if step.fields[name].only_tokens and not step.fields[name].twin_of}
    tokens: Any = step.sizes["tokens"]
    tokens = tokens.node.expr
    returned = step.outputs
    captured = _captured(graph, rows | set(constants), tokens, at)
    groups = _groups(graph, captured, at)
    place = {node: index for index, nodes in enumerate(groups) for node in nodes}
    last = _last_readers(graph, place, len(groups))
    segments = []
    for index, nodes in enumerate(groups):
        outputs = [
            node
            for node in nodes
            if isinstance(value(node), Tensor)
            and (node in returned or any(place.get(user, index) != index for user in readers_of(node)))
        ]
        inputs, run = _function(nodes, outputs, constants)
        segments.append(
            Segment(
                nodes[0] in captured,
                tuple(name for node in nodes if (name := operation_of(node)) in at),  # type: ignore[misc]
                run,
                tuple(names.get(node, node.name) for node in inputs),
                tuple(
                    Output(
                        node.name,
                        tuple(value(node).shape[1:]) if _per_token(tokens, node) else None,
                        value(node).dtype,
                        last[node],
                    )
                    for node in outputs
                ),
            )
        )
    return SplitStep(tuple(segments), tuple(names.get(node, node.name) for node in returned))


def _captured(graph: fx.Graph, inputs: set[fx.Node], tokens: Any, at: Collection[str]) -> set[fx.Node]:
    """Return the nodes that can be captured for a number of tokens, if ``inputs`` have fixed addresses."""
    calls = [node for node in graph.nodes if node.op == "call_function" and not is_number(node)]
    barred: set[fx.Node] = set()
    while True:
        captured: set[fx.Node] = set()
        free = set(inputs)
        for node in calls:
            reads = reads_of(node)
            if node.target is operator.getitem and operation_of(reads[0]) in at:
                continue  # Handled with its source.
            fit = symbols(node) <= {tokens} and all(symbols(each) <= {tokens} for each in numbers_before(node))
            if operation_of(node) in at:
                results = _results(node)
                # The result of a splitting operation is copied to the memory that pieces read.
                free |= {node, *results} if all(_per_token(tokens, each) for each in results) else set()
            elif fit and node not in barred and not computes_with_sizes(node) and free.issuperset(reads):
                captured.add(node)
                free.add(node)
        out = {node for node in captured if not _may_leave(tokens, node) and not captured.issuperset(readers_of(node))}
        if not out:
            return captured
        barred |= out | {node.args[0] for node in out if node.target is operator.getitem}  # type: ignore[misc]


def _groups(graph: fx.Graph, captured: set[fx.Node], at: Collection[str]) -> list[list[fx.Node]]:
    """Return the nodes of each segment. A part of a tuple belongs to the segment of the tuple."""
    groups: list[list[fx.Node]] = []
    group_of: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or is_number(node):
            continue
        if node.target is operator.getitem and node.args[0] in group_of:
            group_of[node] = group_of[node.args[0]]
            group_of[node].append(node)
            continue
        if not groups or operation_of(node) in at or (groups[-1][0] in captured) != (node in captured):
            groups.append([])
        groups[-1].append(node)
        group_of[node] = groups[-1]
    return groups


def _last_readers(graph: fx.Graph, place: Mapping[fx.Node, int], returned: int) -> dict[fx.Node, int]:
    """Return, for each node, the index of the last segment that reads its memory."""
    memory = AliasAnalysis(graph)
    found: dict[fx.Node, int] = {}
    for node in place:
        shown = {node, *(each for where in memory.places(node) for each in memory.aliases(where))}
        readers = [user for each in shown for user in readers_of(each)]
        found[node] = max((returned if user.op == "output" else place.get(user, 0) for user in readers), default=0)
    return found


def _function(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], constants: Mapping[fx.Node, Tensor]
) -> tuple[list[fx.Node], Callable[..., tuple[Tensor, ...]]]:
    """Return the values that ``nodes`` read from others, and a function from these to ``outputs``."""
    own = set(nodes)
    # Each piece computes sizes again, from tensors, which may be its own.
    body = list(dict.fromkeys(each for node in nodes for each in (*numbers_before(node), node)))
    reads = dict.fromkeys(each for node in body for each in node.all_input_nodes if each not in own)
    outside = [each for each in reads if not is_number(each)]
    inputs = [each for each in outside if each not in constants]
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for each in outside:
        copies[each] = part.placeholder(each.name)
        copies[each].meta = dict(each.meta)
    for node in body:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in outputs))
    return inputs, lower(part, {copies[each]: constants[each] for each in outside if each in constants})


def _per_token(tokens: Any, node: fx.Node) -> bool:
    """Return whether the first dimension of a tensor is the number of tokens, and no other is symbolic."""
    fake = value(node)
    first, *others = fake.shape if isinstance(fake, Tensor) and fake.dim() else [0]
    if any(isinstance(size, SYMBOLIC) for size in others):
        return False
    return isinstance(first, SYMBOLIC) and first.node.expr == tokens


def _may_leave(tokens: Any, node: fx.Node) -> bool:
    return not symbols(node) or _per_token(tokens, node) or isinstance(value(node), (tuple, list))


def _results(node: fx.Node) -> list[fx.Node]:
    """Return a node, or its parts if it returns several tensors, or nothing if it only writes."""
    if value(node) is None:
        return []
    return [node] if isinstance(value(node), Tensor) else list(node.users)


def operation_of(node: fx.Node) -> str | None:
    """Return the name of the operation that a node calls, or None."""
    found = ops.operation_of_node(node.target)
    return None if found is None else found.name


aten = torch.ops.aten

SYMBOLIC: Any = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ENDS: Mapping[Any, int] = {aten.arange.default: 0, aten.arange.start: 1}
"""Overloads with a scalar that is the size of the result, by its position."""


def is_number(node: fx.Node) -> bool:
    """Return whether a node computes a number, or a list of them, such as a shape."""
    leaves = pytree.tree_leaves(value(node))
    return node.op == "call_function" and bool(leaves) and all(isinstance(each, (*SYMBOLIC, int)) for each in leaves)


def numbers_before(node: fx.Node) -> list[fx.Node]:
    """Return the sizes that a node reads and those that they are computed from, in order."""
    found: list[fx.Node] = []
    for each in node.all_input_nodes:
        if is_number(each):
            found += [*numbers_before(each), each]
    return found


def reads_of(node: fx.Node) -> list[fx.Node]:
    """Return the values that a node reads, itself or for a size."""
    return [more for each in node.all_input_nodes for more in (reads_of(each) if is_number(each) else [each])]


def readers_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a value, themselves or for a size."""
    return [more for user in node.users for more in (readers_of(user) if is_number(user) else [user])]


def symbols(node: fx.Node) -> set[Any]:
    """Return the free symbols of a node's value: of a number, or of the shapes of tensors."""
    found = value(node)
    sizes = [
        size for each in pytree.tree_leaves(found) for size in (each.shape if isinstance(each, Tensor) else [each])
    ]
    return {symbol for size in sizes if isinstance(size, SYMBOLIC) for symbol in size.node.expr.free_symbols}


def computes_with_sizes(node: fx.Node) -> bool:
    """Return whether a node takes a symbolic size, or a number computed from one, other than in a shape."""
    end = _ENDS.get(node.target)
    given = [each for place, each in enumerate(node.args) if place != end] + list(node.kwargs.values())
    return any(isinstance(each, fx.Node) and is_number(each) and symbols(each) for each in given)
