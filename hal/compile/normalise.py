"""One spelling for each thing in a traced graph, so that a pattern meets its code however that was written.

The trace has seen to the first half: operators, methods and functions are overloads by then. This does the rest. Parts
of a tensor are slices, whether they were split, chunked or indexed; a view of a view is one view; what changes nothing
is gone; an addition in place, into a tensor that nothing else can see, is an addition.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default,
})  # fmt: skip
"""Elements in the same order under another shape: which of them it is, follows from the shapes."""
SPLITS = frozenset({aten.split_with_sizes.default, aten.split.Tensor, aten.split.sizes, aten.chunk.default})
NOTHING = frozenset({aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default})
IN_PLACE = {aten.add_.Tensor: aten.add.Tensor, aten.mul_.Tensor: aten.mul.Tensor}
WHOLE = 2**63 - 1
"""The end of a slice that goes on to the end."""


def normalise(graph: fx.Graph) -> None:
    """Rewrite ``graph``, whose nodes carry fake tensors as ``meta["val"]``, into the spelling above."""
    for node in list(graph.nodes):
        if node.target in IN_PLACE:
            _out_of_place(node)
        elif node.target in SPLITS:
            _slice_parts(node)
    for node in list(graph.nodes):
        if node.target is aten.slice.Tensor:
            _plain_slice(node)
    for node in list(graph.nodes):
        if node.op == "call_function" and _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in VIEWS and node.args[0].target in VIEWS:
            node.update_arg(0, node.args[0].args[0])
    _drop_unused(graph)


def value(node: Any) -> Any:
    """What a node stood for in the trace; anything else stands for itself."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def same_size(one: Any, other: Any) -> bool:
    """Whether two sizes, perhaps symbolic ones of the same trace, are written alike. Adds no guard."""
    return str(value(one)) == str(value(other))


def same_shape(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two shapes are alike in every size."""
    first, second = list(one), list(other)
    return len(first) == len(second) and all(map(same_size, first, second))


def mutates(node: fx.Node) -> bool:
    """Whether a node writes into an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _changes_nothing(node: fx.Node) -> bool:
    if node.target in NOTHING:
        return True
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(value(source), Tensor):
        return False
    if node.target in VIEWS or node.target is aten.slice.Tensor:
        return same_shape(value(node).shape, value(source).shape)
    if node.target is aten._to_copy.default:
        return set(node.kwargs) <= {"dtype"} and value(node).dtype == value(source).dtype
    return False


def _slice_parts(node: fx.Node) -> None:
    source: Any = node.args[0]
    arguments = dict(zip([each.name for each in node.target._schema.arguments], node.args, strict=False)) | node.kwargs  # type: ignore[union-attr]
    dim = arguments.get("dim", 0) % value(source).dim()
    start = 0
    parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
    for index, fake in enumerate(value(node)):
        size = fake.shape[dim]
        if not isinstance(size, int):
            return  # where a part begins is known in the trace only
        part = parts.get(index)
        if part is not None:
            with node.graph.inserting_before(part):
                piece = node.graph.call_function(aten.slice.Tensor, (source, dim, start, start + size))
            piece.meta = dict(part.meta)
            part.replace_all_uses_with(piece)
            node.graph.erase_node(part)
        start += size


def _plain_slice(node: fx.Node) -> None:
    """All arguments written out, counted from the front."""
    given: tuple[Any, ...] = node.args
    source, dim, start, end, step = given + (None, 0, None, None, 1)[len(given) :]
    size = value(source).shape[dim]
    if not isinstance(size, int) or isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return
    first, last, _ = slice(start, None if end == WHOLE else end, None).indices(size)
    node.args = (source, dim % value(source).dim(), first, last, step)


def _out_of_place(node: fx.Node) -> None:
    """``x.add_(y)`` becomes an addition if a node made x, and no view shows it; readers behind it read the sum."""
    target: Any = node.args[0]
    if (
        target.op != "call_function"
        or target.target in VIEWS | {aten.slice.Tensor, operator.getitem}
        or mutates(target)
    ):
        return
    order = {each: place for place, each in enumerate(node.graph.nodes)}
    if any(_shows(user) for user in target.users if user is not node):
        return
    later = [user for user in target.users if order[user] > order[node]]
    node.target = IN_PLACE[node.target]  # type: ignore[index]
    for user in later:
        user.replace_input_with(target, node)


def _shows(node: fx.Node) -> bool:
    """Whether what a node gives may be the same memory as what it was given."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(each.alias_info is not None for each in node.target._schema.returns)


def _drop_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not mutates(node):
            graph.erase_node(node)
