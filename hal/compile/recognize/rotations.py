"""Rewrites from the overloads that spell a rotary embedding out, as in transformers' decoders.

They differ in the elements that form a pair, in whether a part of each head is rotated, and in how cosines and sines
are given. In 16 bits transformers rounds in between, and hal's operation once.
Rotations by complex numbers become pairs of real ones, which every device and capture supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hal.compile.fx.symbolic_sizes import value
from hal.compile.rewrite.rewrite import Rewrite
from hal.ops import FLOATING, Draw, Sample

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


hal = torch.ops.hal

HALVES = (torch.bfloat16, torch.float16)
Rotated = tuple[Tensor, Tensor]
Spelled = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of a query or key ``[batch, heads, length, head_dim]``, and cosines and sines of its positions."""


def _halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _whole(turn: Callable[[Tensor], Tensor]) -> Spelled:
    def spelled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + turn(x) * sin

    return spelled


def _widened(turn: Callable[[Tensor], Tensor]) -> Spelled:
    def spelled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.float() * cos + turn(x).float() * sin

    return spelled


def _partly(turn: Callable[[Tensor], Tensor]) -> Spelled:
    def spelled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        rotated, kept = x[..., :width], x[..., width:]
        return torch.cat((rotated * cos + turn(rotated) * sin, kept), dim=-1)

    return spelled


def _by_parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _rotation(
    name: str,
    spelled: Spelled,
    *,
    interleaved: bool = False,
    part: int = 1,
    half: bool = False,
    wide: bool = False,
    transposed: bool = True,
) -> Rewrite:
    """Return a rewrite.

    Args:
        name: of the rewrite.
        spelled: computes the rotation of one tensor.
        interleaved: whether the elements of a pair are adjacent.
        part: heads are so many times as wide as what is rotated of them, in the samples.
        half: whether cosines and sines are given once for each pair, rather than for each element.
        wide: whether cosines and sines are float32 beside a query and key in 16 bits, which are rounded once.
        transposed: whether the heads are before the length, in all of them.
    """

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if transposed else x

    def pattern(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
        rotated = spelled(query, cos, sin), spelled(key, cos, sin)
        return (rotated[0].to(query.dtype), rotated[1].to(key.dtype)) if wide else rotated

    def operation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
        batch, length, _, width = turned(query).shape
        rows = [each.reshape(-1, each.shape[2], width) for each in map(turned, (query, key))]
        angles = [torch.cat((each, each), dim=-1) if half else each for each in (cos, sin)]
        angles = [turned(each).expand(batch, length, 1, each.shape[-1]).reshape(-1, each.shape[-1]) for each in angles]
        rotated = hal.rotary_embedding.default(*rows, *angles, interleaved)
        first, second = (turned(each.view(batch, length, -1, width)) for each in rotated)
        return first, second

    def samples(draw: Draw) -> Iterator[Sample]:
        if wide and draw.dtype is torch.float32:  # in which this is no other spelling
            draw = Draw(torch.bfloat16, draw.device)
        for batch, heads, kv_heads, length, width in ((3, 8, 2, 5, 64), (1, 3, 1, 6, 32), (2, 4, 4, 1, 128)):
            for rows in {1, batch}:
                angles = turned(draw.normal(rows, length, 1, width // 2).float())
                if not half:
                    angles = angles.repeat_interleave(2, dim=-1) if interleaved else angles.repeat(1, 1, 1, 2)
                yield (
                    turned(draw.normal(batch, length, heads, width * part)),
                    turned(draw.normal(batch, length, kv_heads, width * part)),
                    angles.cos().to(torch.float32 if wide else draw.dtype),
                    angles.sin().to(torch.float32 if wide else draw.dtype),
                )

    rotary = "head_dim//2" if half else "head_dim" if part == 1 else "rotary_dim"
    return Rewrite(
        name,
        pattern,
        operation,
        samples,
        axes={
            "query": "batch num_heads length head_dim" if transposed else "batch length num_heads head_dim",
            "key": "batch num_kv_heads length head_dim" if transposed else "batch length num_kv_heads head_dim",
            "cos": f"rows=1|batch 1 length {rotary}" if transposed else f"rows=1|batch length 1 {rotary}",
            "sin": f"rows=1|batch 1 length {rotary}" if transposed else f"rows=1|batch length 1 {rotary}",
        },
        dtypes={
            "query": HALVES if wide else FLOATING,
            "key": "query",
            "cos": torch.float32 if wide else "query",
            "sin": "cos",
        },
    )


def _alone(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _whole(_halves)(query, cos, sin)


def _rotated_alone(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, width = query.shape
    rows = query.reshape(-1, heads, width)
    angles = [each.expand(batch, length, 1, width).reshape(-1, width) for each in (cos, sin)]
    rotated: Tensor = hal.rotary_embedding.default(rows, rows[:, :0], *angles, False)[0]
    return rotated.view(batch, length, heads, width)


def _alone_samples(draw: Draw) -> Iterator[Sample]:
    for batch, heads, length, width in ((3, 8, 5, 64), (1, 3, 6, 32), (2, 4, 1, 128)):
        for rows in {1, batch}:
            angles = draw.normal(rows, length, 1, width // 2).float().repeat(1, 1, 1, 2)
            query = draw.normal(batch, length, heads, width)
            yield query, angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)


_rotation_alone = Rewrite(
    "query_rotary_embedding",
    _alone,
    _rotated_alone,
    _alone_samples,
    axes={
        "query": "batch length num_heads head_dim",
        "cos": "rows=1|batch length 1 head_dim",
        "sin": "rows=1|batch length 1 head_dim",
    },
    dtypes={"query": FLOATING, "cos": "query", "sin": "cos"},
)

rotations = (
    _rotation("rotary_embedding", _whole(_halves)),
    _rotation("untransposed_rotary_embedding", _whole(_halves), transposed=False),
    _rotation("partial_rotary_embedding", _partly(_halves), part=2),
    _rotation("interleaved_rotary_embedding", _whole(_neighbours), interleaved=True),
    _rotation("partial_interleaved_rotary_embedding", _partly(_neighbours), interleaved=True, part=2),
    _rotation("rotary_embedding_by_parts", _by_parts, half=True),
    _rotation("rotary_embedding_by_wide_angles", _whole(_halves), wide=True),
    _rotation("interleaved_rotary_embedding_by_wide_angles", _widened(_neighbours), interleaved=True, wide=True),
    _rotation_alone,  # after those of pairs
)
"""``untransposed`` is Gemma 3n's and 4's spelling, with the heads behind the length. ``by_parts`` is gpt-oss': both
halves of a head are computed, then concatenated. ``by_wide_angles`` is OLMo 2's, which rounds once, and ERNIE 4.5's,
which widens both before. The ``query`` alone is rotated in layers of Gemma 3n and 4 that read other layers' keys."""
