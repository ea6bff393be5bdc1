"""Alias analysis: which nodes of a graph share memory, and which of them read and write it.

By its overload's schema, a node aliases its arguments or allocates new memory. Inputs of the graph alias if the tensors
that they were traced with do. The effects of a node that calls no overload are unknown: nothing is moved across it.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

Place = Hashable
"""A storage: all views of it have the same place."""

_NAMES = (
    "getitem",
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "pow",
    "neg",
    "pos",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
    "not_",
)
PURE = frozenset(
    {
        *(getattr(operator, name) for name in _NAMES),
        torch.sym_int,
        torch.sym_float,
        torch.sym_not,
        torch.sym_max,
        torch.sym_min,
        math.ceil,
        math.floor,
    }
)
"""Functions in traced graphs that are not overloads and have no side effects."""
SIZES = frozenset(
    {
        aten.sym_size.int,
        aten.sym_size.default,
        aten.sym_numel.default,
        aten.sym_stride.int,
        aten.sym_stride.default,
        aten.sym_storage_offset.default,
    }
)
"""Overloads that read a tensor's metadata, not its memory."""
UNMARKED = frozenset({aten._unsafe_view.default})
"""Views whose schema does not declare the alias."""


def mutates(node: fx.Node) -> bool:
    """Return whether a node writes into an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def unknown(node: fx.Node) -> bool:
    """Return whether a node may have effects beyond its result and the writes in its schema."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target not in PURE
    if node.target not in _acting:
        schema = node.target._schema
        _acting[node.target] = not schema.is_mutable and (not schema.returns or node.is_impure(impure_random=False))
    return _acting[node.target]


_acting: dict[Any, bool] = {}
"""Caches, by overload, whether it returns and writes nothing, or is registered as impure."""


def needed(node: fx.Node) -> bool:
    """Return whether a node has an effect even if its result is not read."""
    return node.op != "call_function" or mutates(node) or unknown(node) or node.is_impure()


def may_alias_input(node: fx.Node) -> bool:
    """Return whether a node's result may alias an argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target not in PURE
    return node.target in UNMARKED or any(each.alias_info is not None for each in node.target._schema.returns)


def written(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes, by its overload's schema, or by ``meta`` for a lowered operation."""
    found: list[fx.Node] = []
    if not mutates(node):
        for place in node.meta.get("written", ()):
            found += _nodes(node.args[place])
        return found
    for argument, given in _given(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _nodes(given)
    return found


class AliasAnalysis:
    """The alias analysis of a graph. Code that changes the graph must update it."""

    def __init__(self, graph: fx.Graph) -> None:
        self._places: dict[fx.Node, tuple[Place, ...]] = {}
        self._aliases: dict[Place, list[fx.Node]] = defaultdict(list)
        self._touched: dict[Place, list[fx.Node]] = defaultdict(list)
        self._written: dict[Place, list[fx.Node]] = defaultdict(list)
        self._effects: list[fx.Node] = []
        self.returned: dict[Place, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            self.add(node)

    def add(self, node: fx.Node) -> None:
        """Add a node, after its arguments."""
        places = self._places[node] = tuple(self._find_places(node))
        for place in places:
            insort(self._aliases[place], node)
        if node.op == "output":
            for read in node.all_input_nodes:
                for place in self.places(read):
                    self.returned[place].append(read)
        strange, writes = unknown(node), written(node)
        if strange or writes:
            insort(self._effects, node)
        if strange or not (may_alias_input(node) or node.target is operator.getitem or node.target in SIZES) or writes:
            for place in {place for read in node.all_input_nodes for place in self.places(read)}:
                insort(self._touched[place], node)
        for place in {place for read in (node.all_input_nodes if strange else writes) for place in self.places(read)}:
            insort(self._written[place], node)

    def drop(self, node: fx.Node) -> None:
        """Remove a node, before it is erased from the graph."""
        read = {place for each in node.all_input_nodes for place in self.places(each)}
        for lists, places in ((self._aliases, self._places.pop(node)), (self._touched, read), (self._written, read)):
            for place in places:
                if (known := lists.get(place)) is not None:
                    _remove(known, node)
        _remove(self._effects, node)

    def take_over(self, old: fx.Node, new: fx.Node) -> None:
        """Let ``new`` alias what ``old`` aliases, when it replaces ``old``."""
        if old is new:
            return
        for place in self._places.get(new, ()):
            _remove(self._aliases[place], new)
        self._places[new] = self.places(old)
        for place in self.places(old):
            if new not in self._aliases[place]:
                insort(self._aliases[place], new)
            self.returned[place] = [new if each is old else each for each in self.returned.get(place, [])]

    def places(self, node: fx.Node) -> tuple[Place, ...]:
        """Return the places that a node aliases; empty for a value that is no tensor."""
        return self._places.get(node, ())

    def aliases(self, place: Place) -> list[fx.Node]:
        """Return the nodes that alias a place, in order."""
        return self._aliases[place]

    def made_by(self, place: Place) -> fx.Node | None:
        """Return the node that allocates a place."""
        members = self._aliases.get(place)
        return members[0] if members else None

    def is_input(self, place: Place) -> bool:
        """Return whether a place exists before the graph runs."""
        members = self._aliases[place]
        return bool(members) and members[0].op in ("placeholder", "get_attr")

    def writers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes, anywhere in the graph, that may write memory of ``node``."""
        for place in self.places(node):
            for writer in self._written.get(place, ()):
                if unknown(writer) or any(may_overlap(node, each) for each in written(writer)):
                    yield writer

    def between(self, first: fx.Node, last: fx.Node, inside: Collection[fx.Node]) -> str | None:
        """Return why the nodes ``inside``, from ``first`` to ``last``, cannot be moved together, or None."""
        touched = {read for node in inside for read in node.all_input_nodes}
        for node in _range(self._effects, first, last):
            if node in inside:
                continue
            if unknown(node):
                return f"{node.name}, between them, has unknown effects"
            places = {place for each in written(node) for place in self.places(each)}
            for read in touched:
                if not places.isdisjoint(self.places(read)) and any(may_overlap(read, each) for each in written(node)):
                    return f"{node.name} writes to memory in between"
        for writer in inside:
            for target in written(writer):
                for place in self.places(target):
                    for node in _range(self._touched[place], first, last):
                        if node not in inside and any(may_overlap(target, read) for read in node.all_input_nodes):
                            return f"{node.name} reads in between what {writer.name} writes"
        return None

    def _find_places(self, node: fx.Node) -> Iterable[Place]:
        if node.op == "output":
            return ()
        if node.op in ("placeholder", "get_attr"):
            fake = node.meta.get("val")
            if isinstance(fake, Tensor) and fake.layout is torch.strided:
                return (fake.untyped_storage()._cdata,)
            return (("attribute", node.target),) if node.op == "get_attr" else (node,)
        if node.target in SIZES:
            return ()
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node):
            return self.places(source) or ((source, node.args[1]),)
        if isinstance(node.target, torch._ops.OpOverload):
            if not may_alias_input(node):
                # Each part of a tuple has separate memory.
                return () if isinstance(node.meta.get("val"), (tuple, list)) else (node,)
            given = [
                each
                for argument, value in _given(node)
                if argument.alias_info is not None or node.target in UNMARKED
                for each in _nodes(value)
            ]
            return dict.fromkeys(place for each in given for place in self.places(each))
        if node.target in PURE:
            return ()
        return (node, *dict.fromkeys(place for each in node.all_input_nodes for place in self.places(each)))


def may_overlap(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes that alias the same place may overlap in it."""
    first, second = _extent(one), _extent(other)
    if first is None or second is None or first[0] != second[0]:
        return True  # Unknown, or one was traced as a view of a node that a rewrite has replaced since.
    return first[1] < second[2] and second[1] < first[2]


def _extent(node: fx.Node) -> tuple[int, int, int] | None:
    """Return a tensor's storage in the trace, with the offsets of its first byte and its end; None if unknown."""
    fake = node.meta.get("val")
    if not isinstance(fake, Tensor) or fake.layout is not torch.strided:
        return None
    form: list[Any] = [fake.storage_offset(), *fake.shape, *fake.stride()]
    if not all(type(each) is int for each in form):
        return None
    start, shape, strides = form[0], form[1 : 1 + fake.dim()], form[1 + fake.dim() :]
    length = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) if 0 not in shape else 0
    size = fake.element_size()
    return fake.untyped_storage()._cdata, start * size, (start + length) * size


def _given(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    for place, argument in enumerate(arguments):
        if place < len(node.args):
            yield argument, node.args[place]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(given: Any) -> list[fx.Node]:
    if isinstance(given, (list, tuple)):
        return [node for each in given for node in _nodes(each)]
    return [given] if isinstance(given, fx.Node) else []


def _range(nodes: list[fx.Node], first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the nodes strictly between two others, in a sorted list."""
    return nodes[bisect_right(nodes, first) : bisect_left(nodes, last)]


def _remove(nodes: list[fx.Node], node: fx.Node) -> None:
    place = bisect_left(nodes, node)
    if place < len(nodes) and nodes[place] is node:
        del nodes[place]
