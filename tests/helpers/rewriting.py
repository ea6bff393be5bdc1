"""Functions traced like models, and a decoder layer in many spellings, for tests of rewrites."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hal import ops
from hal.compile.pass_manager import PassManager, Report
from hal.compile.rewrite.rewrite import Rewrite, of_operation
from hal.ops.declaration.constraints import Draw
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel


def node_of(operation: Operation) -> Kernel:
    """Return what a call is in a trace: a fused operation's body, since models do not call fused operations."""
    return operation.rebound(node_of) if operation.fused else operation.node


@attrs.frozen
class Traced:
    """A function's graph before and after passes, and its inputs."""

    graph: fx.GraphModule
    mode: FakeTensorMode
    inputs: tuple[Tensor, ...]
    original: fx.GraphModule

    def apply(self, *passes: Any) -> Report:
        """Add passes, where an operation's name stands for its rewrite, and apply them."""
        manager = PassManager(self.graph, self.mode)
        for each in passes:
            manager.add(rewrite_of(each) if isinstance(each, str) else each)
        return manager.apply()

    def calls(self) -> Counter[str]:
        """Return the number of calls of each overload, by name."""
        return Counter(
            node.target.name().partition("::")[2]
            for node in self.graph.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )

    def check(self, inputs: Sequence[Tensor] | None = None) -> None:
        """Check that results and mutations equal those of the trace bit for bit, with references as kernels."""
        inputs = self.inputs if inputs is None else inputs
        torch.testing.assert_close(run(self.graph, inputs), run(self.original, inputs), rtol=0, atol=0, equal_nan=True)


def rewrite_of(name: str) -> Rewrite:
    return of_operation(ops.operation(name))


def run(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Any]:
    """Run a function on copies of the inputs, which share memory like the originals; return results and copies."""
    memories: dict[int, Tensor] = {}
    copies = []
    for each in inputs:
        storage = each.untyped_storage()
        memory = memories.setdefault(storage._cdata, torch.empty(0, dtype=torch.uint8).set_(storage).clone())
        copies.append(
            torch.empty(0, dtype=each.dtype).set_(
                memory.untyped_storage(), each.storage_offset(), each.shape, each.stride()
            )
        )
    with torch.no_grad(), ops.intercepted(lambda each, _: each.reference):
        return [function(*copies), copies]


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, copy)


def trace(function: Callable[..., Any], *inputs: Tensor, rows: Collection[int] = ()) -> Traced:
    """Trace ``function(*inputs)``; the first dimension of the inputs at indices ``rows`` is symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for index, each in enumerate(inputs):
        sizes = [DimDynamic.DUCK if dim == 0 and index in rows else DimDynamic.STATIC for dim in range(each.dim())]
        fakes.append(mode.from_tensor(each, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    with torch.inference_mode(False), torch.no_grad(), ops.intercepted(lambda each, _: node_of(each)), mode:
        graph = make_fx(lambda *given: function(*given))(*fakes)
    return Traced(graph, mode, inputs, copied(graph))


ADDITIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda h, x: h + x,
    lambda h, x: x + h,
    lambda h, x: h.add(x),
    lambda h, x: torch.add(x, h),
    lambda h, x: torch.add(input=h, other=x),
    lambda h, x: h.add_(x),
    lambda h, x: torch.ops.aten.add_(x, h),
]


def _added_to(h: Tensor, x: Tensor) -> Tensor:
    h += x
    return h


def _written_in_passing(h: Tensor, x: Tensor) -> Tensor:
    h.add_(x)
    return h


def _alpha(h: Tensor, x: Tensor) -> Tensor:
    return torch.add(h, x, alpha=1)


ADDITIONS += [_added_to, _written_in_passing, _alpha]

Sizes = list[int]


def _slices(x: Tensor, sizes: Sizes) -> list[Tensor]:
    a, b, _ = sizes
    return [x[:, :a], x[..., a : a + b], x[:, a + b :]]


def _narrowed(x: Tensor, sizes: Sizes) -> list[Tensor]:
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    return [x.narrow(dim, start, size) for dim, start, size in zip((-1, 1, -1), starts, sizes, strict=True)]


def _twice(x: Tensor, sizes: Sizes) -> list[Tensor]:
    query, rest = x.split([sizes[0], sizes[1] + sizes[2]], dim=-1)
    return [query, *rest.chunk(2, dim=-1)]


def _backwards(x: Tensor, sizes: Sizes) -> list[Tensor]:
    value = x[:, -sizes[2] :]
    key = x[:, sizes[0] : -sizes[2]]
    return [x[:, : -2 * sizes[2]], key, value]


SPLITS: list[Callable[[Tensor, Sizes], Sequence[Tensor]]] = [
    lambda x, sizes: x.split(sizes, dim=-1),
    lambda x, sizes: torch.split(x, sizes, 1),
    lambda x, sizes: x.tensor_split([sizes[0], sizes[0] + sizes[1]], dim=-1),
    _slices,
    _narrowed,
    _twice,
    _backwards,
]

HEADS: list[Callable[[Tensor, int, int], Tensor]] = [
    lambda x, heads, dim: x.view(-1, heads, dim),
    lambda x, heads, dim: x.view(x.shape[0], heads, dim),
    lambda x, heads, dim: x.view(x.size(0), -1, dim),
    lambda x, heads, dim: x.reshape(-1, heads, dim),
    lambda x, heads, dim: torch.reshape(x, (x.shape[0], heads, dim)),
    lambda x, heads, dim: x.unflatten(-1, (heads, dim)),
    lambda x, heads, dim: x.unflatten(1, (-1, dim)),
    lambda x, heads, dim: x.view(*x.shape[:-1], heads, dim),
    lambda x, heads, dim: x.unsqueeze(0).view(x.shape[0], heads, dim),
    lambda x, heads, dim: x.view(-1, heads * 2, dim // 2).view(-1, heads, dim),
]


def _heads_first(x: Tensor, counts: Sizes, dim: int) -> Sequence[Tensor]:
    return x.view(-1, sum(counts), dim).split(counts, dim=1)


def _heads_first_by_slices(x: Tensor, counts: Sizes, dim: int) -> Sequence[Tensor]:
    x = x.unflatten(-1, (-1, dim))
    return x[:, : counts[0]], x[:, counts[0] : counts[0] + counts[1]], x.narrow(1, counts[0] + counts[1], counts[2])


def _flat_and_back(x: Tensor, counts: Sizes, dim: int) -> Sequence[Tensor]:
    parts = x.view(-1, sum(counts), dim).split(counts, dim=1)
    return [part.flatten(1).unflatten(1, (count, dim)) for part, count in zip(parts, counts, strict=True)]


HEADS_FIRST = [_heads_first, _heads_first_by_slices, _flat_and_back]


@attrs.frozen
class Spelling:
    """A decoder layer whose sizes and spelling are drawn from a seed."""

    seed: int

    @property
    def draw(self) -> random.Random:
        """Return a new generator at each access, so that choices are the same in every trace."""
        return random.Random(self.seed)

    @property
    def config(self) -> dict[str, Any]:
        """Return the sizes: every ratio of query to key heads from 1 to 8; binary choices alternate."""
        bits = self.draw.getrandbits(3) if self.seed >= 16 else self.seed // 2
        return {
            "kv_heads": 1 + self.seed % 3,
            "ratio": 1 + self.seed % 8,
            "head_dim": 128 if bits & 1 else 64,
            "eps": 1e-5 if bits & 2 else 1e-6,
            "bias": bool(bits & 4),
            "dtype": torch.bfloat16 if self.seed % 2 else torch.float32,
        }

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        """Return inputs of :meth:`layer`; the first and the last four have a row for each token."""
        config = self.config
        kv_heads, dim = config["kv_heads"], config["head_dim"]
        heads, width, draw = kv_heads * config["ratio"], 48, Draw(config["dtype"], seed=self.seed)
        out = (heads + 2 * kv_heads) * dim
        blocks = tokens // 16 + 2
        cache = (blocks, 16, kv_heads, dim)
        angles = draw.normal(tokens, dim // 2).float().repeat(1, 2)
        return (
            draw.normal(tokens, width),
            draw.normal(width),
            draw.normal(width),
            draw.normal(width),
            draw.normal(out, width, scale=0.2),
            draw.normal(out if config["bias"] else 0),
            draw.normal(dim),
            draw.normal(dim),
            draw.normal(width, heads * dim, scale=0.1),
            draw.normal(2 * 32, width, scale=0.2),
            draw.normal(width, 32),
            draw.normal(*cache),
            draw.normal(*cache),
            angles.cos().to(config["dtype"]),
            angles.sin().to(config["dtype"]),
            draw.permutation(blocks * 16)[:tokens].to(torch.int32),
        )

    rows = (0, 13, 14, 15)
    fused: ClassVar = {"add_rms_norm": 2, "split_qkv_rmsnorm_rope_cache": 1}

    def layer(
        self,
        x: Tensor,
        first_norm: Tensor,
        second_norm: Tensor,
        last_norm: Tensor,
        qkv_weight: Tensor,
        bias: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        o_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
    ) -> Tensor:
        draw, config = self.draw, self.config
        eps, dim = config["eps"], config["head_dim"]
        counts = [config["kv_heads"] * config["ratio"], config["kv_heads"], config["kv_heads"]]
        hidden = ops.linear(x, x.new_ones(x.shape[1], x.shape[1]))
        qkv = ops.linear(ops.rms_norm(hidden, first_norm, eps), qkv_weight, bias if config["bias"] else None)
        if draw.random() < 0.3:
            query, key, value = draw.choice(HEADS_FIRST)(qkv, counts, dim)
        else:
            parts = draw.choice(SPLITS)(qkv, [count * dim for count in counts])
            query, key, value = (draw.choice(HEADS)(part, n, dim) for part, n in zip(parts, counts, strict=True))
        if draw.random() < 0.5:
            query, key = ops.rms_norm(query, q_norm, eps), ops.rms_norm(key, k_norm, eps)
        else:
            key = ops.rms_norm(key, weight=k_norm, eps=eps)
            query = ops.rms_norm(query, q_norm, eps)
        query, key = ops.rotary_embedding(query, key, cos, sin)
        ops.store_kv_cache(key, value, key_cache, value_cache, slots)
        mixed = ops.linear(draw.choice([_flat, torch.flatten, _viewed])(query, 1), o_weight)
        hidden = draw.choice(ADDITIONS)(hidden, mixed)
        inner = ops.silu_and_mul(ops.linear(ops.rms_norm(hidden, second_norm, eps), up_weight))
        hidden = draw.choice(ADDITIONS)(hidden, ops.linear(inner, down_weight))
        return ops.rms_norm(hidden, last_norm, eps)


def _flat(x: Tensor, dim: int) -> Tensor:
    return x.reshape(x.shape[0], -1)


def _viewed(x: Tensor, dim: int) -> Tensor:
    return x.view(-1, x.shape[1] * x.shape[2])


def mixture(seed: int, steps: int = 14) -> Callable[[Tensor, Tensor], Any]:
    """Return a function of two ``[rows, 24]``: views, in-place writes, sums and norms in an order drawn from a seed.

    Some of its tensors share memory, some are inputs, and any may be written, read later, or returned.
    """

    def function(x: Tensor, y: Tensor) -> Any:
        draw = random.Random(seed)
        pool = [x, y, x.exp(), y.sin()]
        for _ in range(steps):
            one, kind = draw.choice(pool), draw.randrange(13)
            if kind == 0:
                one.add_(draw.choice([1.5, 2.5]))
            elif kind in (1, 2, 9, 10):
                other = draw.choice(
                    [each for each in pool if each.dim() == one.dim() and each.shape[1:] == one.shape[1:]]
                )
                if kind == 1:
                    one += other
                else:
                    pool.append(one + other)
            elif kind == 3 and one.shape[-1] > 2:
                pool.append(one[..., 1 : 1 + int(one.shape[-1]) // 2])
            elif kind == 4 and one.dim() == 2 and one.shape[1] == 24:
                pool.append(one.view(-1, 2, 12))
            elif kind == 5 and one.dim() == 3:
                pool.append(one[:, 1])
            elif kind == 6 and one.dim() > 1 and one[0].numel() % 24 == 0:
                pool.append(one.reshape(-1, 24))
            elif kind == 7 and one.shape[-1] % 3 == 0:
                pool.extend(one.chunk(3, dim=-1)[:2])
            elif kind == 8:
                pool.append(one.unsqueeze(1).squeeze(1))
            elif kind in (11, 12):
                pool.append(ops.rms_norm(pool[-1], y[0, : pool[-1].shape[-1]], 1e-6))
        return tuple(each * 1 for each in pool[-4:]), pool[draw.randrange(len(pool))]

    return function
