"""Matching of a pattern's nodes with nodes of a graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.fx.arithmetic import RESPELLED, Reading, operands, readings, same_number, target_of
from hal.compile.fx.normalize import IN_PLACE, VIEWS, same_shape, value

aten = torch.ops.aten

COMMUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})
CASTS = frozenset({aten._to_copy.default})

Binding = dict[fx.Node, fx.Node]
"""Maps nodes of the pattern to the matched nodes of the graph."""


def computes(node: fx.Node) -> bool:
    """Return whether a node is a call that computes more than a size."""
    return node.op == "call_function" and not isinstance(
        value(node), (int, torch.SymInt, torch.SymFloat, torch.SymBool)
    )


def reach(node: fx.Node) -> set[fx.Node]:
    """Return a node and all nodes that it depends on."""
    found, left = {node}, [node]
    while left:
        new = [read for read in left.pop().all_input_nodes if read not in found]
        found.update(new)
        left += new
    return found


def kind(node: fx.Node) -> Any:
    if node.op != "call_function":
        return node.op
    return "view" if node.target in VIEWS else target_of(node)


def alike(part: fx.Node, found: Any) -> bool:
    """Return whether a graph node makes the same call as a pattern node, or has an equivalent reading."""
    if not isinstance(found, fx.Node) or found.op != "call_function":
        return False
    return kind(part) == kind(found) or any(True for _ in _readings_as(part, found))


def _readings_as(part: fx.Node, found: fx.Node) -> Iterator[Reading]:
    """Yield the readings of a graph node that make the same call as the pattern node."""
    if found.target not in RESPELLED or part.target not in RESPELLED:
        if kind(part) == kind(found):
            yield next(readings(found))
        return
    mine = next(readings(part))
    for each in readings(found):
        # Other readings must agree in the factor: ``x - y`` is no ``x + y``, although it is a sum with the factor -1.
        if each.target is mine.target and (each.written or _agree(mine.compared()[2:], each.compared()[2:])):
            yield each


def _agree(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(same_number, one, other))


def bind(part: fx.Node, found: Any, bound: Binding, met: list[fx.Node] | None = None) -> Iterator[Binding]:
    """Yield every way to match ``part`` and all that it depends on with ``found`` and what that depends on.

    With ``met``, matching skips casts and treats in-place writes as their results, and appends both to ``met``.
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
    reads = operands(part)
    ways = [each.operands for each in _readings_as(part, found)] or [operands(found)]
    for given in ways:
        if part.target in VIEWS:
            reads, given = reads[:1], given[:1]
        elif len(reads) != len(given) or (part.target is operator.getitem and reads[1] != given[1]):
            continue
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
    """Return the equivalent orders of a node's operands: two for a sum or product, unless it scales an operand."""
    if kind(part) in COMMUTE and given[2:] in ([], [1]):
        return [given, [given[1], given[0], *given[2:]]]
    return [given]


def _is_tensor(read: Any) -> bool:
    return isinstance(read, fx.Node) and (read.op == "placeholder" or computes(read))


def numbers_of(bound: Binding) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a number of the pattern's example and the number in its position in the graph."""
    for part, found in bound.items():
        if isinstance(value(part), Tensor):
            yield from zip(value(part).shape, value(found).shape, strict=False)
        if part.op == "call_function":
            for reading in _readings_as(part, found):
                pairs = zip(operands(part), reading.operands, strict=False)
                yield from ((one, other) for one, other in pairs if not _is_tensor(other))


def is_same_number(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def same(node: fx.Node, found: fx.Node, places: Binding) -> bool:
    """Return whether a node of the pattern's second trace equals its matched node in everything."""
    here, there = value(node), value(found)
    if isinstance(here, Tensor) and not (isinstance(there, Tensor) and _is_alike(here, there)):
        return False
    if node.op != "call_function" or node.target in VIEWS:
        return True
    reads = next(readings(node)).compared()
    return any(
        len(reads) == len(order)
        and all(
            places.get(one) is other if _is_tensor(one) else same_number(one, other)
            for one, other in zip(reads, order, strict=True)
        )
        for reading in _readings_as(node, found)
        for order in _orders(node, reading.compared())
    )


def difference(node: fx.Node, found: fx.Node) -> str | None:
    """Describe how a node of the pattern's second trace differs from its matched node, or return None."""
    here, there = value(node), value(found)
    differences = []
    if node.op == "call_function" and node.target not in VIEWS:
        mine, theirs = next(readings(node)), next(_readings_as(node, found), next(readings(found)))
        compared = zip(mine.compared(), theirs.compared(), strict=False)
        for one, other, agreeing in zip(
            mine.operands, theirs.operands, itertools.starmap(same_number, compared), strict=False
        ):
            # Where dtypes differ, the types of numbers can be part of the reason.
            if not (_is_tensor(one) or _is_tensor(other)) and (
                not agreeing or (_dtype(here) != _dtype(there) and type(one) is not type(other))
            ):
                differences.append(f"has {value(other)}, where the pattern has {value(one)}")
                break
    if isinstance(here, Tensor) and isinstance(there, Tensor) and not _is_alike(here, there):
        differences.append(f"returns {_tensor(there)}, where the pattern returns {_tensor(here)}")
    return f"{_name(node)} {', and '.join(differences)}" if differences else None


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and same_shape(one.shape, other.shape)


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else node.name


def _dtype(given: Any) -> torch.dtype | None:
    return given.dtype if isinstance(given, Tensor) else None


def _tensor(given: Tensor) -> str:
    return f"{str(given.dtype).removeprefix('torch.')} [{', '.join(map(str, given.shape))}]"
