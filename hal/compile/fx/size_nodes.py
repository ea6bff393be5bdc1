"""The nodes of a traced graph that compute sizes, and the values that they are sizes of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hal.compile.fx.symbolic_sizes import value

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
