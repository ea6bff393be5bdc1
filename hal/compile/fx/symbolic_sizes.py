"""Symbolic sizes in a traced graph: comparison, and the nodes that read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.fx.alias_analysis import SIZES
from hal.ops.declaration import axes

aten = torch.ops.aten


def value(node: Any) -> Any:
    """Return a node's value in the trace. Other objects are returned unchanged."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def same_size(one: Any, other: Any) -> bool:
    """Return whether two sizes, or the nodes of two sizes, are written identically in one trace. Adds no guard."""
    return axes.same_size(value(one), value(other))


def same_shape(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether two shapes, perhaps with nodes as sizes, have the same sizes."""
    return axes.same_sizes(map(value, one), map(value, other))


def read_sizes_of_inputs(graph: fx.Graph) -> dict[str, fx.Node]:
    """Read every size of an input once, at the top of the graph. Return the nodes by size."""
    asking = [node for node in graph.nodes if node.target in SIZES]
    if not any(isinstance(value(node), torch.SymInt) for node in asking):
        return {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    found: dict[str, tuple[fx.Node, int | None]] = {}
    for node in inputs:
        fake: Any = value(node)
        if isinstance(fake, torch.SymInt):
            found.setdefault(str(fake), (node, None))
        shape: Any = fake.shape if isinstance(fake, Tensor) else ()
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), (node, dim))
    asked: dict[str, fx.Node] = {}
    last = inputs[-1]
    for node in asking:
        known = str(value(node))
        if not isinstance(value(node), torch.SymInt) or known not in found:
            continue
        source, place = found[known]
        if place is None:
            asked[known] = source
        elif known not in asked:
            node.target, node.args = aten.sym_size.int, (source, place)
            if last.next is not node:
                last.append(node)
            asked[known] = last = node
            continue
        node.replace_all_uses_with(asked[known])
        graph.erase_node(node)
    return asked
