"""How the nodes of a pattern stand for nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.normalise import IN_PLACE, VIEWS, same_shape, same_size, value

aten = torch.ops.aten

COMMUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})
CASTS = frozenset({aten._to_copy.default})

Binding = dict[fx.Node, fx.Node]
"""By node of the pattern, the node of the graph that it stands for."""


def computes(node: fx.Node) -> bool:
    """Whether a node does more than compute a size."""
    return node.op == "call_function" and not isinstance(
        value(node), (int, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def reach(node: fx.Node) -> set[fx.Node]:
    """A node and all that it reads, directly or not."""
    found, left = {node}, [node]
    while left:
        new = [read for read in left.pop().all_input_nodes if read not in found]
        found.update(new)
        left += new
    return found


def kind(node: fx.Node) -> Any:
    return "view" if node.target in VIEWS else node.target if node.op == "call_function" else node.op


def alike(part: fx.Node, found: Any) -> bool:
    return isinstance(found, fx.Node) and found.op == "call_function" and kind(part) == kind(found)


def bind(part: fx.Node, found: Any, bound: Binding, met: list[fx.Node] | None = None) -> Iterator[Binding]:
    """Every way in which ``part`` and all that it reads can stand for ``found`` and what that reads.

    With ``met``, casts are passed over and writes in place taken for what they compute; it gets a list of them.
    """
    if met is not None and isinstance(found, fx.Node) and part not in bound:
        while found.target in CASTS and part.op == "call_function" and part.target not in CASTS:
            met.append(found)
            found = found.args[0]
    if part in bound:
        if bound[part] is found:
            yield bound
        return
    if part.op == "placeholder":
        if isinstance(found, fx.Node) and isinstance(value(found), Tensor):
            yield {**bound, part: found}
        return
    if not alike(part, found):
        if met is None or not isinstance(found, fx.Node) or found.target not in IN_PLACE:
            return
        if IN_PLACE[found.target] is not part.target:
            return
        met.append(found)
    if found in bound.values():
        return
    reads, given = operands(part), operands(found)
    if part.target in VIEWS:
        reads, given = reads[:1], given[:1]
    elif len(reads) != len(given) or (part.target is operator.getitem and reads[1] != given[1]):
        return
    for order in _orders(part, given):
        pairs = [(read, one) for read, one in zip(reads, order, strict=True) if _is_tensor(read)]
        yield from _bind_all(pairs, {**bound, part: found}, met)


def _bind_all(pairs: list[tuple[fx.Node, Any]], bound: Binding, met: list[fx.Node] | None) -> Iterator[Binding]:
    if not pairs:
        yield bound
        return
    for each in bind(*pairs[0], bound, met):
        yield from _bind_all(pairs[1:], each, met)


def _orders(part: fx.Node, given: list[Any]) -> list[list[Any]]:
    """The orders in which a node's operands mean the same: a sum's, unless it scales the second."""
    if part.target in COMMUTE and given[2:] in ([], [1]):
        return [given, [given[1], given[0], *given[2:]]]
    return [given]


def _is_tensor(read: Any) -> bool:
    return isinstance(read, fx.Node) and (read.op == "placeholder" or computes(read))


def numbers_of(bound: Binding) -> Iterator[tuple[Any, Any]]:
    """The numbers of the pattern's example, each with the one in its place in the graph."""
    for part, found in bound.items():
        if isinstance(value(part), Tensor):
            yield from zip(value(part).shape, value(found).shape, strict=False)
        if part.op == "call_function":
            yield from zip(operands(part), operands(found), strict=False)


def operands(node: fx.Node) -> list[Any]:
    """A call's arguments one by one, with the defaults that it leaves out; lists as their lengths and their items."""
    given = list(node.args)
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        given += [
            node.kwargs.get(each.name, each.default_value if each.has_default_value() else None)
            for each in arguments[len(given) :]
        ]
    else:
        given += [each for _, each in sorted(node.kwargs.items())]
    return [item for each in given for item in _items(each)]


def _items(given: Any) -> Iterator[Any]:
    if isinstance(given, (list, tuple)):
        yield f"{len(given)} items"
        for each in given:
            yield from _items(each)
    else:
        yield given


def is_same_number(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def same(node: fx.Node, found: fx.Node, places: Binding) -> bool:
    """Whether a node of the pattern's own trace and the one that it stands for agree in everything."""
    here, there = value(node), value(found)
    if isinstance(here, Tensor) and not (
        isinstance(there, Tensor) and here.dtype == there.dtype and same_shape(here.shape, there.shape)
    ):
        return False
    if node.op != "call_function" or node.target in VIEWS:
        return True
    reads, given = operands(node), operands(found)
    return len(reads) == len(given) and any(
        all(
            places.get(one) is other if _is_tensor(one) else same_size(one, other)
            for one, other in zip(reads, order, strict=True)
        )
        for order in _orders(node, given)
    )
