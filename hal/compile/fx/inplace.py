"""Replacement of in-place arithmetic and redundant copies where the difference is not observable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.fx.alias_analysis import AliasAnalysis, unknown
from hal.compile.fx.symbolic_sizes import same_shape, value

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
