"""The pass that computes with complex numbers as pairs of real ones, which every device and capture supports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.fx.symbolic_sizes import value

aten = torch.ops.aten

SIZED = (aten.view.default, aten.expand.default)
"""Functions whose second argument is the shape of the result."""
BY_DIM = (aten.slice.Tensor, aten.select.int, aten.unsqueeze.default)
"""Functions whose second argument is a dimension."""
ALIKE = (aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default)
SUPPORTED = frozenset(
    {*SIZED, *BY_DIM, *ALIKE, aten.mul.Tensor, aten.view_as_complex.default, aten.view_as_real.default}
)


def polar(size: Tensor, angle: Tensor) -> Tensor:
    """Return complex numbers as ``torch.polar`` does, which torch cannot trace for any number of tokens."""
    return torch.view_as_complex(torch.stack((size * angle.cos(), size * angle.sin()), -1))


def complex_pairs(module: fx.GraphModule) -> int:
    """Replace the complex tensors of a graph by real ones with another last dimension. Return the number replaced.

    All remain as they are if one is an input or a result of the graph, or of a function that is not known here.
    """
    graph = module.graph
    complexes = [node for node in graph.nodes if _is_complex(node)]
    involved = dict.fromkeys([*complexes, *(user for node in complexes for user in node.users)])
    if not complexes or not all(map(_is_supported, involved)):
        return 0
    pairs: dict[Any, fx.Node] = {}
    for node in complexes:
        with graph.inserting_before(node):
            pairs[node] = _Pairs(graph, pairs).of(node)
    for node in involved:
        if node not in pairs:
            node.replace_all_uses_with(pairs[node.args[0]])
    for node in sorted(involved, reverse=True):
        graph.erase_node(node)
    return len(complexes)


def _is_complex(node: Any) -> bool:
    found = value(node)
    return isinstance(found, Tensor) and found.is_complex()


def _is_supported(node: fx.Node) -> bool:
    return node.target in SUPPORTED and "dtype" not in node.kwargs


class _Pairs:
    """Makes the nodes of the pairs.

    Args:
        graph: the graph, whose nodes are inserted at its present place.
        known: the node of the pairs of each complex node before that.
    """

    def __init__(self, graph: fx.Graph, known: dict[Any, fx.Node]) -> None:
        self._graph, self._known = graph, known

    def of(self, node: fx.Node) -> fx.Node:
        """Return the node of a complex node's pairs."""
        first, *others = node.args
        if node.target is aten.view_as_complex.default:
            assert isinstance(first, fx.Node)
            return first
        if node.target is aten.mul.Tensor:
            return self._product(first, others[0])
        if node.target in SIZED:
            others = [[*others[0], 2]]  # type: ignore[misc]
        elif node.target in BY_DIM:
            dim: Any = others[0] if others else 0
            others = [dim if dim >= 0 else dim - 1, *others[1:]]
        return self._call(node.target, self._known[first], *others, **node.kwargs)

    def _product(self, one: Any, other: Any) -> fx.Node:
        if not (_is_complex(one) and _is_complex(other)):
            pair, factor = (self._known[one], other) if _is_complex(one) else (self._known[other], one)
            if isinstance(value(factor), Tensor) and value(factor).dim():
                factor = self._call(aten.unsqueeze.default, factor, -1)
            return self._call(aten.mul.Tensor, pair, factor)
        (a, b), (c, d) = (
            [self._call(aten.select.int, self._known[each], -1, part) for part in (0, 1)] for each in (one, other)
        )
        ac, bd, ad, bc = (self._call(aten.mul.Tensor, *each) for each in ((a, c), (b, d), (a, d), (b, c)))
        return self._stacked([self._call(aten.sub.Tensor, ac, bd), self._call(aten.add.Tensor, ad, bc)])

    def _stacked(self, parts: list[fx.Node]) -> fx.Node:
        return self._call(aten.stack.default, parts, -1)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._graph.call_function(target, args, kwargs)
        made.meta["val"] = target(*fx.map_arg(args, value), **kwargs)
        return made
