"""The normal form of a traced graph, which makes pattern matching independent of how code is written.

Tracing already turns operators, methods and functions into overloads. Normalization does the rest. Parts of a tensor,
whether split, chunked, indexed or reshaped, become slices of the tensor. A view of a view becomes one view, and two
transpositions that cancel become none. Nodes without effect disappear, such as the factor that ``1 / x`` has in a
trace. Sizes are read from the graph's inputs. In-place writes to tensors that nothing else aliases become out-of-place.
Arithmetic is kept: :mod:`hal.compile.fx.arithmetic` knows its equivalent forms.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.fx.alias_analysis import AliasAnalysis, mutates, needed, unknown
from hal.compile.fx.arithmetic import is_unit_factor
from hal.compile.fx.symbolic_sizes import read_sizes_of_inputs, same_shape, same_size, value

__all__ = ["IN_PLACE", "VIEWS", "mutates", "normalize", "same_shape", "same_size", "value"]

aten = torch.ops.aten

IN_PLACE = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
}


COPIES = frozenset({aten.lift_fresh_copy.default, aten._to_copy.default})


def out_of_place(graph: fx.Graph) -> int:
    """Replace in-place calls by out-of-place ones, such as ``x.add_(y)`` by ``x + y``. Return the number replaced.

    This requires that a node of the graph allocates the tensor, that no other node that aliases it is read after the
    write, and that the result has the same dtype and strides. Later readers then read the result.
    """
    nodes = [node for node in graph.nodes if node.target in IN_PLACE]
    if not nodes:
        return 0
    memory, count = AliasAnalysis(graph), 0
    # By place: the node with its current value, and the number of aliasing nodes up to that.
    heads: dict[Any, tuple[fx.Node, int]] = {}
    for node in nodes:
        target: Any = node.args[0]
        places = memory.places(target)
        if len(places) != 1:
            continue
        (place,) = places
        members = memory.aliases(place)
        head, done = heads.get(place, (members[0], 1))
        if target is not head or not _made_here(head) or not _same_result(node):
            continue
        early = done
        while members[early] is not node:
            early += 1
        if any(_read_behind(member, node) for member in members[done:early]):
            continue
        node.target = IN_PLACE[node.target]  # type: ignore[index]
        for user in [user for user in target.users if user > node]:
            user.replace_input_with(target, node)
        heads[place] = node, early + 1
        count += 1
    return count


def _made_here(node: fx.Node) -> bool:
    return node.op == "call_function" and not unknown(node)


def _read_behind(member: fx.Node, write: fx.Node) -> bool:
    return any(user > write for user in member.users)


def _same_result(node: fx.Node) -> bool:
    fake, other = (each.meta.get("val") if isinstance(each, fx.Node) else each for each in node.args[:2])
    if not isinstance(fake, Tensor) or not isinstance(other, (Tensor, int, float, torch.SymInt, torch.SymFloat)):
        return False
    if isinstance(other, (torch.SymInt, torch.SymFloat)):
        other = 1 if isinstance(other, torch.SymInt) else 1.0
    dtype = torch.result_type(fake, other)
    if node.target is aten.div_.Tensor and not dtype.is_floating_point:
        return False
    return (
        dtype == fake.dtype and fake.is_contiguous() and (not isinstance(other, Tensor) or other.device == fake.device)
    )


def without_copies(graph: fx.Graph) -> int:
    """Replace copies by their source if only their memory differs. Return the number replaced.

    Neither may be written, and the copy must not be returned.
    """
    copies = [node for node in graph.nodes if node.target in COPIES and _like_its_source(node)]
    if not copies:
        return 0
    memory = AliasAnalysis(graph)
    needless = [
        node
        for node in copies
        if not any(memory.returned.get(place) for place in memory.places(node))
        and not any(True for each in (node, node.args[0]) for _ in memory.writers(each))
    ]
    for node in needless:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return len(needless)


def _like_its_source(node: fx.Node) -> bool:
    ours, theirs = value(node), value(node.args[0])
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor) or set(node.kwargs) - {"dtype"}:
        return False
    return ours.dtype == theirs.dtype and same_shape(ours.stride(), theirs.stride())


VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.unsqueeze.default,
    }
)
"""Overloads that keep the order of elements and change the shape; the shapes determine which one is meant."""
SPLITS = frozenset({aten.split_with_sizes.default, aten.split.Tensor, aten.split.sizes, aten.chunk.default})
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
PARTS = SPLITS | {aten.unbind.int}
SAME = frozenset({aten.alias.default, aten.detach.default, aten.lift_fresh.default})


def normalize(graph: fx.Graph) -> None:
    """Bring ``graph``, whose nodes carry fake tensors as ``meta["val"]``, into the normal form."""
    _Normalizer(graph).run()


class _Normalizer:
    """Normalizes a graph in one pass from its inputs, so that the arguments of a node are already normalized."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.sizes = read_sizes_of_inputs(graph)

    def run(self) -> None:
        changed = True
        while changed:  # Repeat after in-place writes or copies were replaced.
            self.normalize_nodes()
            self.drop_unread()
            changed = out_of_place(self.graph) + without_copies(self.graph) > 0

    def normalize_nodes(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or not _is_known(node):
                continue
            with self.graph.inserting_before(node):
                if node.target in PARTS:
                    self.parts(node)
                elif node.target is aten.select.int:
                    self.replace(node, self.one(node.args[0], node.args[1], node.args[2], node))
                elif node.target is aten.slice.Tensor:
                    self.slice(node)
                elif node.target in VIEWS:
                    self.replace(node, self.viewed(node.args[0], node, node.target))
                elif node.target is aten.transpose.int:
                    self.replace(node, _transposed_back(node))
                elif node.target in SAME or is_unit_factor(node):
                    self.replace(node, node.args[0])

    def drop_unread(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if not node.users and not needed(node):
                self.graph.erase_node(node)

    def replace(self, node: fx.Node, other: Any) -> None:
        if other is not node and other is not None:
            node.replace_all_uses_with(other)
            self.graph.erase_node(node)

    def parts(self, node: fx.Node) -> None:
        """Replace every part of a tensor by a slice."""
        source: Any = node.args[0]
        arguments = {each.name: given for each, given in zip(_arguments(node), node.args, strict=False)} | node.kwargs
        dim: Any = arguments.get("dim", 0)
        dim %= value(source).dim()
        single = node.target is aten.unbind.int
        sizes = [1 if single else part.shape[dim] for part in value(node)]
        if not all(type(size) is int for size in sizes):
            return  # The start of a part is known in the trace only.
        for part in list(node.users):
            index: Any = part.args[1] if part.target is operator.getitem else None
            if type(index) is not int:
                continue
            index %= len(sizes)
            start = sum(sizes[:index])
            self.replace(
                part,
                self.one(source, dim, index, part)
                if single
                else self.sliced(source, dim, start, start + sizes[index], part),
            )

    def slice(self, node: fx.Node) -> None:
        given: tuple[Any, ...] = node.args
        start: Any
        end: Any
        source, dim, start, end, step = given + (None, 0, None, None, 1)[len(given) :]
        if same_shape(value(node).shape, value(source).shape) and step == 1:
            self.replace(node, source)
            return
        dim %= value(source).dim()
        size, start, end = value(source).shape[dim], value(start), value(end)
        if type(size) is not int or any(type(each) not in (int, NoneType) for each in (start, end)) or step != 1:
            return
        start, end, _ = slice(start, end).indices(size)
        self.replace(node, self.sliced(source, dim, start, max(start, end), node))

    def one(self, source: Any, dim: Any, index: Any, node: fx.Node) -> fx.Node | None:
        """Return ``source.select(dim, index)``, which is ``node``, as a reshaped slice, or None if impossible."""
        dim %= value(source).dim()
        size = value(source).shape[dim]
        if type(size) is not int or type(index) is not int:
            return None
        piece = self.sliced(source, dim, index % size, index % size + 1, None)
        return self.viewed(piece, node, aten.view.default)

    def sliced(self, source: fx.Node, dim: int, start: int, end: int, node: fx.Node | None) -> fx.Node:
        """Return a slice of ``source``, with the metadata of ``node``."""
        size = value(source).shape[dim]
        if start == 0 and end == size:
            return source
        if source.target is aten.slice.Tensor and source.args[1] == dim and source.args[4:] in ((), (1,)):
            outer: Any = source.args[2]
            if type(outer) is int:
                return self.sliced(source.args[0], dim, outer + start, outer + end, node)  # type: ignore[arg-type]
        if source.target in RESHAPES:
            deeper = self.through_view(source, dim, start, end, node)
            if deeper is not None:
                return deeper
        arguments = source, dim, start, end
        if node is not None and node.target is aten.slice.Tensor and node.args == arguments:
            return node
        made = self.graph.call_function(aten.slice.Tensor, arguments)
        if node is not None:
            made.meta = dict(node.meta)
        else:
            with value(source).fake_mode:
                made.meta["val"] = aten.slice.Tensor(value(source), dim, start, end)
        return made

    def through_view(self, view: fx.Node, dim: int, start: int, end: int, node: fx.Node | None) -> fx.Node | None:
        """Return a slice of a view as a view of a slice, or None if there is no such slice."""
        source: Any = view.args[0]
        outer, inner = list(value(source).shape), list(value(view).shape)
        step = _product(inner[dim + 1 :])
        for place, size in enumerate(outer):
            width = _product(outer[place + 1 :])
            if type(size) is not int or type(width) is not int or type(step) is not int or not width or not step:
                continue
            if start * step % width or end * step % width or not same_size(inner[dim] * step, size * width):
                continue
            if not same_size(_product(outer[:place]), _product(inner[:dim])):
                continue
            piece = self.sliced(source, place, start * step // width, end * step // width, None)
            shape = [*inner[:dim], end - start, *inner[dim + 1 :]]
            if node is None:
                fake = value(piece)
                with fake.fake_mode:
                    return self.viewed(piece, None, aten.view.default, fake.view(shape))
            return self.viewed(piece, node, aten.view.default)
        return None

    def viewed(self, source: Any, node: fx.Node | None, target: Any, fake: Any = None) -> fx.Node | None:
        """Return ``source`` in the shape of ``node``, as a single view, or None if its sizes have no nodes."""
        fake = value(node) if fake is None else fake
        sizes = self.written(list(fake.shape))
        if sizes is None:
            return None
        kind = aten.view.default
        if target is aten.reshape.default:
            kind = target
        while source.target in RESHAPES:
            kind = source.target if source.target is aten.reshape.default else kind
            source = source.args[0]
        if same_shape(value(source).shape, fake.shape):
            return source  # type: ignore[no-any-return]
        if node is not None and node.target is kind and node.args == (source, sizes):
            return node
        made = self.graph.call_function(kind, (source, sizes))
        made.meta = {**(node.meta if node is not None else {}), "val": fake}
        return made

    def written(self, shape: list[Any]) -> list[Any] | None:
        """Return a shape as arguments of a view, or None if sizes have no nodes."""
        open_sizes = [index for index, size in enumerate(shape) if type(size) is not int]
        if len(open_sizes) == 1 and 0 not in shape:
            shape[open_sizes[0]] = -1
            return shape
        sizes = [size if type(size) is int else self.sizes.get(str(size)) for size in shape]
        return None if None in sizes else sizes


def _is_known(node: fx.Node) -> bool:
    """Return whether a node and its first argument have values from the trace."""
    return (
        "val" in node.meta and bool(node.args) and (not isinstance(node.args[0], fx.Node) or "val" in node.args[0].meta)
    )


def _transposed_back(node: fx.Node) -> Any:
    """Return what a transposition undoes: the operand of another of the same dimensions, or None."""
    source: Any = node.args[0]
    if source.target is not aten.transpose.int:
        return None
    rank = value(node).dim()
    one, other = ({dim % rank for dim in each.args[1:]} for each in (node, source))
    return source.args[0] if one == other else None


def _product(sizes: Iterable[Any]) -> Any:
    return functools.reduce(operator.mul, sizes, 1)


def _arguments(node: fx.Node) -> Any:
    return node.target._schema.arguments  # type: ignore[union-attr]
