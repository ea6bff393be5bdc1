"""Tests for sites that rewrites skip, and the reported reasons. Every graph keeps its results bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.rewriting import trace
from torch import Tensor

from hal import ops
from hal.compile.rewrite.rewrite import Rewrite
from hal.ops import FLOATING, Draw

EPS = 1e-6
TOKENS = 4
HEADS, KV_HEADS, DIM = 4, 2, 64
SPLIT = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]


def rows_of(inputs: Sequence[Tensor]) -> list[int]:
    return [index for index, each in enumerate(inputs) if each.shape[:1] == (TOKENS,)]


def keeps_off(rewrite: str | Rewrite, reason: str, function: Callable[..., Any], *inputs: Tensor) -> None:
    traced = trace(function, *inputs, rows=rows_of(inputs))
    (report,) = traced.apply(rewrite).passes
    assert not report.matches, traced.graph.graph
    assert reason in " | ".join(report.near_misses), report.near_misses
    traced.check()


def fires(rewrite: str | Rewrite, function: Callable[..., Any], *inputs: Tensor, times: int = 1) -> None:
    traced = trace(function, *inputs, rows=rows_of(inputs))
    (report,) = traced.apply(rewrite).passes
    assert len(report.matches) == times, f"{report.near_misses}\n{traced.graph.graph}"
    traced.check()


def norm_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = Draw(dtype, seed=3)
    return draw.normal(4, 32), draw.normal(4, 32), draw.normal(32)


def qkv_inputs() -> tuple[Tensor, ...]:
    """Return a merged projection's input and weight, two norms, cos and sin, two caches, and slots."""
    draw = Draw(seed=4)
    angles = draw.normal(4, DIM // 2).repeat(1, 2)
    caches = draw.normal(3, 16, KV_HEADS, DIM), draw.normal(3, 16, KV_HEADS, DIM)
    slots = draw.permutation(48)[:4].to(torch.int32)
    weights = draw.normal(sum(SPLIT), 32, scale=0.2), draw.normal(DIM), draw.normal(DIM)
    return draw.normal(4, 32), *weights, angles.cos(), angles.sin(), *caches, slots


def rotated(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv.split(SPLIT, dim=-1)
    query = ops.rms_norm(query.view(-1, HEADS, DIM), q_norm, EPS)
    key = ops.rms_norm(key.view(-1, KV_HEADS, DIM), k_norm, EPS)
    return *ops.rotary_embedding(query, key, cos, sin), value.view(-1, KV_HEADS, DIM)


IN_BETWEEN: dict[str, tuple[Callable[..., Any], str | None]] = {
    "an input is written": (lambda x, residual, hidden: x.add_(1), "add_"),
    "an input by a view": (lambda x, residual, hidden: residual.view(-1).mul_(2), "mul_"),
    "an input by a slice": (lambda x, residual, hidden: residual[:, 3:5].mul_(2), "mul_"),
    "an input by a selection": (lambda x, residual, hidden: residual[:, 2].mul_(2), "mul_"),
    "an input by its transpose": (lambda x, residual, hidden: residual.t().mul_(2), "mul_"),
    "the sum by a view": (lambda x, residual, hidden: hidden.view(-1).mul_(2), "mul_"),
    "another buffer": (lambda x, residual, hidden: torch.zeros(4, 32).add_(1), None),
    "the sum is read": (lambda x, residual, hidden: hidden * 2, None),
}
"""What happens between a sum and its norm, and the operation that a rewrite must not be moved across.

The replacement is inserted before a reader of the sum.
"""


@pytest.mark.parametrize("case", IN_BETWEEN)
def test_what_happens_in_between(case: str) -> None:
    act, writer = IN_BETWEEN[case]

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x + residual
        early = act(x, residual, hidden)
        return ops.rms_norm(hidden, weight, EPS), hidden * 2 if writer else early

    if writer is None:
        fires("add_rms_norm", function, *norm_inputs())
    else:
        keeps_off("add_rms_norm", f"{writer} writes to memory in between", function, *norm_inputs())


def test_a_weight_written_behind_the_norm_is_no_obstacle() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x + residual
        normed = ops.rms_norm(hidden, weight, EPS)
        weight.add_(1)
        x.mul_(2)
        return normed, hidden * weight

    fires("add_rms_norm", function, *norm_inputs())


def test_fewer_dimensions_than_are_declared() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x + residual
        return ops.rms_norm(hidden, weight, EPS), hidden

    x, residual, weight = norm_inputs()
    reason = "x is [32], but declared `... width`: its rank is 1"
    keeps_off("add_rms_norm", reason, function, x[0], residual[0], weight)


def test_a_sum_that_is_read_before_the_norm_weight_is_there() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x + residual
        return ops.rms_norm(hidden, hidden.sum(0) * weight, EPS), hidden

    keeps_off("add_rms_norm", "before its argument mul is computed", function, *norm_inputs())


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (0, "x is bfloat16 and residual is float32"),
        (1, "x is float32 and residual is bfloat16"),
        (2, "weight is bfloat16, but declared float32"),
    ],
)
def test_mixed_dtypes(index: int, reason: str) -> None:
    given = list(norm_inputs())
    given[index] = given[index].bfloat16()
    keeps_off("add_rms_norm", reason, add_norm, *given)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    hidden = x + residual
    return ops.rms_norm(hidden, weight, EPS), hidden


@pytest.mark.parametrize("shape", [(32,), (1, 32), (4, 1), ()])
def test_a_residual_that_broadcasts(shape: tuple[int, ...]) -> None:
    x, _, weight = norm_inputs()
    keeps_off("add_rms_norm", ", but declared `... width`", add_norm, x, torch.ones(shape), weight)


def test_a_cast_in_between() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x + residual
        return ops.rms_norm(hidden.float(), weight.float(), EPS), hidden

    keeps_off("add_rms_norm", "_to_copy changes the dtype to torch.float32", function, *norm_inputs(torch.bfloat16))


def test_an_addition_with_a_factor() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = torch.add(x, residual, alpha=2)
        return ops.rms_norm(hidden, weight, EPS), hidden

    keeps_off("add_rms_norm", "numbers are not those of the pattern", function, *norm_inputs())


IN_PLACE: dict[str, tuple[Callable[..., Any], Callable[..., Any], str | None]] = {
    "beside a view that is read later": (
        lambda hidden: hidden[:, :2],
        lambda before, hidden: before * 2,
        "add_ writes in place to memory that others read",
    ),
    "before a view": (lambda hidden: None, lambda before, hidden: hidden[:, :2] * 2, None),
    "behind a reader of a view": (lambda hidden: hidden[:, :2] * 2, lambda before, hidden: before, None),
    "behind a reader": (lambda hidden: hidden * 3, lambda before, hidden: (before, hidden), None),
}
"""What is made of a tensor before a sum in place and behind it, and why the sum keeps its rewrite off."""


@pytest.mark.parametrize("case", IN_PLACE)
def test_in_place(case: str) -> None:
    before, behind, reason = IN_PLACE[case]

    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x.exp()
        early = before(hidden)
        hidden.add_(residual)
        return ops.rms_norm(hidden, weight, EPS), behind(early, hidden)

    if reason is None:
        fires("add_rms_norm", function, *norm_inputs())
    else:
        keeps_off("add_rms_norm", reason, function, *norm_inputs())


@pytest.mark.parametrize(
    ("dtype", "source", "reason"),
    [
        (torch.float32, lambda x: x, "add_ writes in place to memory that others read"),
        (torch.bfloat16, torch.exp, "add_ writes in place"),
    ],
    ids=["into an input", "with a wider dtype"],
)
def test_in_place_of_what_it_must_not(dtype: torch.dtype, source: Callable[[Tensor], Tensor], reason: str) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = source(x)
        hidden += residual.float()
        return ops.rms_norm(hidden, weight, EPS)

    keeps_off("add_rms_norm", reason, function, *norm_inputs(dtype))


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (lambda query, key: query.sum(), "rms_norm has another reader, sum_1"),
        (lambda query, key: key, "rms_norm_1 has another reader, output"),
    ],
)
def test_an_intermediate_that_is_read_or_returned(reader: Callable[..., Any], reason: str) -> None:
    def function(x: Tensor, weight: Tensor, q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor) -> Any:
        query, key, value = ops.linear(x, weight).split(SPLIT, dim=-1)
        query = ops.rms_norm(query.view(-1, HEADS, DIM), q_norm, EPS)
        key = ops.rms_norm(key.view(-1, KV_HEADS, DIM), k_norm, EPS)
        return *ops.rotary_embedding(query, key, cos, sin), value.reshape(-1, KV_HEADS, DIM) + 1, reader(query, key)

    keeps_off("split_qkv_rmsnorm_rope", reason, function, *qkv_inputs()[:6])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("output written", "mul_ writes to memory that"),
        ("source written", "zero_ writes to memory that"),
        ("both returned", "the graph returns another of the same memory"),
        ("view of an input returned", "the graph returns another of the same memory"),
        ("alone", None),
        ("returned alone", None),
    ],
)
def test_an_output_that_is_a_view(case: str, reason: str | None) -> None:
    def function(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        qkv = x.view(4, -1) if case == "view of an input returned" else ops.linear(x, weight)
        query, key, value = rotated(qkv, *rest)
        if case == "output written":
            value.mul_(2)
            return query, key, qkv.sum()
        if case == "source written":
            total = value.sum()
            qkv.zero_()
            return query, key, total, value + 1
        if case == "both returned":
            return query, key, value, qkv
        if case in ("view of an input returned", "returned alone"):
            return query, key, value
        return query, key, value + 1

    inputs = qkv_inputs()[:6]
    if case == "view of an input returned":
        inputs = Draw(seed=9).normal(4, sum(SPLIT)), *inputs[1:]
        traced = trace(function, *inputs)  # A view of a symbolic number of rows would not be contiguous.
        (report,) = traced.apply("split_qkv_rmsnorm_rope").passes
        assert reason is not None
        assert reason in " | ".join(report.near_misses)
        traced.check()
    elif reason is None:
        fires("split_qkv_rmsnorm_rope", function, *inputs)
    else:
        keeps_off("split_qkv_rmsnorm_rope", reason, function, *inputs)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("plain", None),
        ("read early", "reads in between what store_kv_cache writes"),
        ("slice read early", "reads in between what store_kv_cache writes"),
        ("written early", "index_put_ writes to memory in between"),
        ("slice written early", "mul_ writes to memory in between"),
        ("slots written early", "add_ writes to memory in between"),
        ("one cache twice", "shares memory with its argument"),
        ("read behind", None),
        ("written before all", None),
    ],
)
def test_the_cache_of_a_fused_write(case: str, reason: str | None) -> None:
    def function(
        x: Tensor,
        weight: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Any:
        extra: list[Tensor] = []
        if case == "written before all":
            keys[0].mul_(2)
        query, key, value = rotated(ops.linear(x, weight), q_norm, k_norm, cos, sin)
        if case == "read early":
            extra.append(keys.sum())
        if case == "slice read early":
            extra.append(values[1:2, 3] * 2)
        if case == "written early":
            keys.view(-1, KV_HEADS, DIM)[slots.long()] = values.view(-1, KV_HEADS, DIM)[:TOKENS]
        if case == "slice written early":
            values[1:, :, 1].mul_(2)
        if case == "slots written early":
            slots.add_(1)
        ops.store_kv_cache(key, value, keys, keys if case == "one cache twice" else values, slots)
        if case == "read behind":
            extra.append(keys[1:2] * 2)
        return query, *extra

    inputs = qkv_inputs()
    if reason is None:
        fires("split_qkv_rmsnorm_rope_cache", function, *inputs)
    else:
        keeps_off("split_qkv_rmsnorm_rope_cache", reason, function, *inputs)


@pytest.mark.parametrize("overlapping", [False, True])
def test_caches_in_one_memory(overlapping: bool) -> None:
    """Halves of one allocation are two buffers; overlapping views are one."""
    *inputs, keys, values, slots = qkv_inputs()
    memory = torch.randn(2 * keys.numel(), generator=torch.Generator().manual_seed(1))
    start = 64 if overlapping else keys.numel()
    keys = memory[: keys.numel()].view(keys.shape)
    values = memory[start : start + keys.numel()].view(keys.shape)

    def function(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        *norms, keys, values, slots = rest
        query, key, value = rotated(ops.linear(x, weight), *norms)
        ops.store_kv_cache(key, value, keys, values, slots)
        return query

    given = *inputs, keys, values, slots
    if overlapping:
        keeps_off("split_qkv_rmsnorm_rope_cache", "shares memory with its argument", function, *given)
    else:
        fires("split_qkv_rmsnorm_rope_cache", function, *given)


SQUARES: dict[str, Any] = {"axes": {"x": "rows width", "y": "rows width"}, "dtypes": {"x": FLOATING, "y": "x"}}


def one_sample(*shapes: tuple[int, ...]) -> Callable[[Draw], Iterator[tuple[Any, ...]]]:
    def samples(draw: Draw) -> Iterator[tuple[Any, ...]]:
        yield tuple(draw.normal(*shape) for shape in shapes)
        yield tuple(draw.normal(*(size + 1 for size in shape)) for shape in shapes)

    return samples


def test_reads_and_writes_in_another_order() -> None:
    def before(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        result = keys * 2
        torch.ops.hal.store_kv_cache(key, value, keys, values, slots)
        return result

    def behind(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        ops.store_kv_cache(key, value, keys, values, slots)
        return keys * 2

    rows, cache = "tokens num_kv_heads head_dim", "num_blocks block_size num_kv_heads head_dim"
    rewrite = Rewrite(
        "before",
        before,
        before,
        ops.operation("store_kv_cache").samples,
        axes={"key": rows, "value": rows, "keys": cache, "values": cache, "slots": "tokens"},
        dtypes={"key": FLOATING, "value": "key", "keys": "key", "values": "key", "slots": torch.int32},
    )
    inputs = next(iter(ops.operation("store_kv_cache").samples(Draw())))
    keeps_off(rewrite, "are in another order", behind, *inputs)
    fires(rewrite, before, *inputs)


def test_what_is_read_made_behind_a_reader() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sine = x.sin()
        return sine, sine * y

    def function(x: Tensor, y: Tensor) -> Any:
        sine = x.sin()
        return sine, sine * (sine + y)

    rewrite = Rewrite("both", both, both, one_sample((3, 4), (3, 4)), **SQUARES)
    keeps_off(rewrite, "before its argument add is computed", function, torch.ones(3, 4), torch.ones(3, 4))


def test_an_input_that_lies_inside() -> None:
    def summed(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() + y

    def function(x: Tensor) -> Any:
        sine = x.sin()
        return sine + sine

    rewrite = Rewrite("summed", summed, summed, one_sample((3, 4), (3, 4)), **SQUARES)
    keeps_off(rewrite, "it reads a value that it computes itself", function, torch.ones(3, 4))


@pytest.fixture
def mark() -> Iterator[Any]:
    """An operator without results or mutations, like those that mark streams."""
    with torch.library._scoped_library("rewrite_tests", "FRAGMENT") as library:
        library.define("mark(Tensor x) -> ()")
        library.impl("mark", lambda x: None, "CompositeExplicitAutograd")
        yield torch.ops.rewrite_tests.mark.default


def test_nothing_is_moved_across_what_is_not_known(mark: Any) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        hidden = x + residual
        mark(weight)
        return ops.rms_norm(hidden, weight, EPS), hidden

    keeps_off("add_rms_norm", "mark, between them, has unknown effects", function, *norm_inputs())


def test_what_a_rewrite_gave_is_one_memory_with_its_views() -> None:
    """An output that was a view in the trace gets its own memory; its views remain views of it."""

    def function(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        *norms, residual, last_norm = rest
        query, key, value = rotated(ops.linear(x, weight), *norms)
        hidden = value + residual
        value[:, 1].mul_(2)
        return query, key, ops.rms_norm(hidden, last_norm, EPS), hidden

    def twice(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        *norms, residual, last_norm = rest
        query, key, value = rotated(ops.linear(x, weight), *norms)
        value = value * 1
        hidden = value + residual
        value[:, 1].mul_(2)
        return query, key, ops.rms_norm(hidden, last_norm, EPS), hidden

    inputs = *qkv_inputs()[:6], Draw(seed=5).normal(4, KV_HEADS, DIM), torch.ones(DIM)
    for each, applied in ((function, (0, 0)), (twice, (1, 0))):
        traced = trace(each, *inputs)
        report = traced.apply("split_qkv_rmsnorm_rope", "add_rms_norm")
        assert tuple(len(each.matches) for each in report.passes) == applied
        assert "mul_ writes to memory in between" in " ".join(report["add_rms_norm"].near_misses)
        traced.check()
