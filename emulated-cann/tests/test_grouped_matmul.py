"""Products of groups of the emulated CANN, through the real torch_npu, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import emulated_cann
import pytest
import torch
import torch_npu
from helpers.thorough import DTYPE, EXHAUSTIVE, thorough
from support.fused_draw import FLOATS, HALVES, Draw, Near, Pairs, Rounded, Same, case, check, parameters
from support.grouped import Grouped, in_layout, int8s, nineteen_bits, packed_int4, rows_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("internal_formats")

LAYOUTS = ("plain", "transposed", "nz", "nz transposed")
LISTS = ("ends", "counts", "pairs")
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: torch.relu,
    2: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    4: lambda x: x / (1 + (-1.702 * x.abs()).exp()) * (0.851 * (x - x.abs())).exp(),
    5: torch.nn.functional.silu,
}


def products(x: Tensor, weight: Tensor, groups: Grouped) -> Tensor:
    """Each group's rows of x [M, K] by its matrix of weight [E, K, N], in float64."""
    return rows_of(groups, lambda expert, begin, end: x[begin:end].double() @ weight[expert].double())


def by_row(values: Tensor, groups: Grouped) -> Tensor:
    """A row of values [E, N] for each row of x."""
    return values.double()[groups.experts()]


@case(*FLOATS, layout=LAYOUTS, listed=LISTS, spread=Grouped.SPREADS)
def of_rows(draw: Draw, layout: str, listed: str, spread: str) -> Pairs:
    groups = Grouped.drawn(draw, spread, listed)
    k, n = 16 * draw.between(1, 6), 16 * draw.between(1, 5)
    x, weight = draw.normal(groups.rows, k), draw.normal(groups.count, k, n)
    if draw.dtype == torch.float32:  # ND only
        layout = "transposed" if "transposed" in layout else "plain"
    bias = draw.normal(groups.count, n, dtype=torch.float16 if draw.dtype == torch.float16 else torch.float32)
    biased = draw.below(2) == 1
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [in_layout(weight, layout)],
        bias=[bias.npu()] if biased else None,
        group_type=0,
        split_item=2,
        **groups.arguments(),
    )
    exact = products(x, weight, groups)
    assert y.shape == (groups.rows, n)
    yield y[: groups.used], Near(exact + by_row(bias, groups) if biased else exact, 3)


@case(*HALVES, layout=LAYOUTS, listed=LISTS)
def by_several_weights(draw: Draw, layout: str, listed: str) -> Pairs:
    groups = Grouped.drawn(draw, "random", listed)
    x, weight = draw.normal(groups.rows, 48), draw.normal(groups.count, 48, 32)
    bias = draw.normal(groups.count, 32, dtype=torch.float16 if draw.dtype == torch.float16 else torch.float32)
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [in_layout(each, layout) for each in weight],
        bias=[each.npu() for each in bias],
        group_type=0,
        split_item=3,
        **groups.arguments(),
    )
    yield y[: groups.used], Near(products(x, weight, groups) + by_row(bias, groups), 3)


@case(*HALVES, layout=LAYOUTS)
def of_separate_rows(draw: Draw, layout: str) -> Pairs:
    """Several tensors of x, and one result, or one for each."""
    counts, weight = [3, 0, 5, 1], draw.normal(4, 32, 48)
    x = [draw.normal(count, 32) for count in counts]
    weights = [in_layout(each, layout) for each in weight]
    exact = [each.double() @ matrix.double() for each, matrix in zip(x, weight, strict=True)]
    (y,) = torch_npu.npu_grouped_matmul(
        [each.npu() for each in x],
        weights,
        group_list=torch.tensor(counts).npu(),
        group_list_type=1,
        group_type=0,
        split_item=2,
    )
    yield y, Near(torch.cat(exact), 3)
    apart = torch_npu.npu_grouped_matmul([each.npu() for each in x], weights, group_type=-1, split_item=0)
    for actual, expected in zip(apart, exact, strict=True):
        yield actual, Near(expected, 3)


@case(*FLOATS, listed=("ends", "counts"))
def of_the_inner_dimension(draw: Draw, listed: str) -> Pairs:
    groups = Grouped.drawn(draw, "random", listed)
    x, weight = draw.normal(groups.rows, 6), draw.normal(groups.rows, 20)
    (y,) = torch_npu.npu_grouped_matmul([x.npu().t()], [weight.npu()], group_type=2, split_item=2, **groups.arguments())
    yield y, Near(torch.stack([x[b:e].double().t() @ weight[b:e].double() for _, b, e in groups.ranges()]), 3)


@case(*HALVES, ends=([2, 2, 7, 9],))
def with_a_list_of_numbers(draw: Draw, ends: list[int]) -> Pairs:
    """The first version of the operation: one result, or one for each weight."""
    x, weight = draw.normal(9, 32), draw.normal(4, 32, 16)
    given = [x.npu()], [each.npu() for each in weight]
    groups = Grouped(ends, 9, "ends")
    (y,) = torch_npu.npu_grouped_matmul(*given, group_list=ends, split_item=2)
    yield y, Near(products(x, weight, groups), 3)
    apart = torch_npu.npu_grouped_matmul(*given, group_list=ends, split_item=0)
    assert [each.shape[0] for each in apart] == [2, 0, 5, 2]
    yield torch.cat(list(apart)), Near(products(x, weight, groups), 3)


@case(*HALVES, spread=Grouped.SPREADS, grouped=(False, True))
def of_int4_beside_int8(draw: Draw, spread: str, grouped: bool) -> Pairs:
    groups = Grouped.drawn(draw, spread, "counts")
    k, n = 256 * draw.between(1, 3), 8 * draw.between(1, 5)
    x, weight = int8s(draw, groups.rows, k), draw.integers(-8, 7, groups.count, k, n, dtype=torch.int32)
    scale = draw.positive(groups.count, k // 256 if grouped else 1, n, dtype=torch.float32) / 4000
    by_token = draw.positive(groups.rows, dtype=torch.float32)
    scaled = weight.double() * scale.double().repeat_interleave(k // scale.shape[1], 1)
    # CANN's documentation requires callers to prepare the bias; another value changes the result.
    moved = draw.normal(groups.count, n, dtype=torch.float32)
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [packed_int4(weight).npu()],
        bias=[(8 * scaled.sum(1) + moved).float().npu()],
        scale=[scale.view(torch.int32).to(torch.int64).npu()],
        per_token_scale=[by_token.npu()],
        group_type=0,
        split_item=2,
        output_dtype=draw.dtype,
        **groups.arguments(),
    )
    exact = (products(x, scaled, groups) + by_row(moved, groups)) * by_token.double()[: groups.used, None]
    yield y[: groups.used], Near(exact, 3)


@case(*HALVES, layout=LAYOUTS, listed=LISTS, spread=Grouped.SPREADS, dynamic=(False, True))
def of_int8(draw: Draw, layout: str, listed: str, spread: str, dynamic: bool) -> Pairs:
    groups = Grouped.drawn(draw, spread, listed)
    k, n = 32 * draw.between(1, 40), 32 * draw.between(1, 3)
    x, weight = int8s(draw, groups.rows, k), int8s(draw, groups.count, k, n)
    scale = draw.positive(groups.count, n, dtype=torch.bfloat16 if draw.dtype == torch.bfloat16 else torch.float32)
    scale, by_token = scale / 4000, draw.positive(groups.rows, dtype=torch.float32)
    bias = draw.integers(-999, 999, groups.count, n, dtype=torch.int32)
    activation, biased = draw.choice(list(ACTIVATIONS)), draw.below(2) == 1
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [in_layout(weight, layout)],
        bias=[bias.npu()] if biased else None,
        scale=[scale.npu()],
        per_token_scale=[by_token.npu()] if dynamic else None,
        group_type=0,
        split_item=2,
        act_type=activation,
        output_dtype=draw.dtype,
        **groups.arguments(),
    )
    exact = products(x, weight, groups) + (by_row(bias, groups) if biased else 0)
    exact = exact * by_row(scale, groups)
    if dynamic:
        exact = exact * by_token.double()[: groups.used, None]
    yield y[: groups.used], Near(ACTIVATIONS[activation](exact))


@case(torch.float32, layout=("plain", "transposed"))
def of_int8_to_integers(draw: Draw, layout: str) -> Pairs:
    groups = Grouped.drawn(draw, "random", "counts")
    x, weight = int8s(draw, groups.rows, 2080), int8s(draw, groups.count, 2080, 64)
    weight[0], x[0] = -128, -128  # the largest sums
    exact = products(x, weight, groups)
    given = [x.npu()], [in_layout(weight, layout)]
    (sums,) = torch_npu.npu_grouped_matmul(
        *given, group_type=0, split_item=2, output_dtype=torch.int32, **groups.arguments()
    )
    yield sums[: groups.used], Same(exact.to(torch.int32))
    scale = draw.positive(groups.count, 64) / 8000
    packed = torch_npu.npu_trans_quant_param(scale.flatten().npu()).view(scale.shape)
    (y,) = torch_npu.npu_grouped_matmul(*given, scale=[packed], group_type=0, split_item=2, **groups.arguments())
    yield y[: groups.used], Rounded(exact * by_row(nineteen_bits(scale), groups))


@case(*HALVES, bits=(8, 4), layout=("plain", "transposed"), factors=("column", "group"), several=(False, True))
def of_quantised_weights(draw: Draw, bits: int, layout: str, factors: str, several: bool) -> Pairs:
    groups = Grouped.drawn(draw, "random", "ends")
    factors = "column" if bits == 8 else factors
    k, n, most = 64, 32, 2 ** (bits - 1)
    weight = draw.integers(-most, most - 1, groups.count, k, n, dtype=torch.int32)
    x = draw.normal(groups.rows, k)
    shape = (groups.count, n) if factors == "column" else (groups.count, 4, n)
    scale, offset = draw.positive(*shape) / most, draw.integers(-3, 3, *shape, dtype=torch.int32).to(draw.dtype)
    shifted = factors == "column"
    stored: Callable[[Tensor], Tensor] = packed_int4 if bits == 4 else lambda each: each.to(torch.int8)
    if layout == "transposed":
        given = stored(weight.transpose(1, 2).contiguous()).npu().transpose(1, 2)
    else:
        given = stored(weight).npu()
    listed: Callable[[Tensor], list[Tensor]] = lambda each: list(each.unbind()) if several else [each]  # noqa: E731
    (y,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        listed(given),
        antiquant_scale=listed(scale.npu()),
        antiquant_offset=listed(offset.npu()) if shifted else None,
        group_type=0,
        split_item=2,
        **groups.arguments(),
    )
    wide: Callable[[Tensor], Tensor] = lambda each: (  # noqa: E731
        each.double().unsqueeze(1) if factors == "column" else each.double().repeat_interleave(k // 4, 1)
    )
    exact = (weight.double() + (wide(offset) if shifted else 0)) * wide(scale)
    yield y[: groups.used], Near(products(x, exact, groups), 3)


def swiglu_rows(x: Tensor, weight: Tensor, scale: Tensor, by_token: Tensor, groups: Grouped) -> Tensor:
    values = products(x, weight, groups) * by_row(scale, groups) * by_token.double()[: groups.used, None]
    gate, up = values.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


@case(*FLOATS, version=(1, 2), spread=Grouped.SPREADS)
def of_int8_with_swiglu(draw: Draw, version: int, spread: str) -> Pairs:
    """The types are those of the weights' scales."""
    groups = Grouped.drawn(draw, spread, "ends" if version == 1 else draw.choice(["ends", "counts"]))
    k, n = 32 * draw.between(1, 40), 64 * draw.between(1, 3)
    x, weight = int8s(draw, groups.rows, k), int8s(draw, groups.count, k, n)
    scale, by_token = draw.positive(groups.count, n) / 4000, draw.positive(groups.rows, dtype=torch.float32)
    if groups.used:
        weight[:, :, 0], x[0] = 0, 0  # a row of zeros
    given = in_layout(weight, "nz")
    if version == 1:
        y, y_scale, _ = torch_npu.npu_grouped_matmul_swiglu_quant(
            x.npu(), given, groups.listed().npu(), scale.npu(), by_token.npu()
        )
    else:
        y, y_scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            x.npu(),
            [given],
            [scale.npu()],
            by_token.npu(),
            groups.listed().npu(),
            group_list_type=groups.arguments()["group_list_type"],
        )
    exact = swiglu_rows(x, weight, scale, by_token, groups)
    largest = exact.abs().amax(1)
    assert y.dtype == torch.int8
    yield y_scale[: groups.used], Near(largest / 127)
    yield y[: groups.used], Rounded(torch.where(largest[:, None] == 0, 0, exact / largest[:, None] * 127))


@case(*FLOATS, interleaved=(False, True), counts=(None, [3, 0, 1], [9, 9]), dim=(-1, 1))
def clipped(draw: Draw, interleaved: bool, counts: list[int] | None, dim: int) -> Pairs:
    x = draw.normal(2, 6, 8) * 6 if dim == 1 else draw.normal(7, 48) * 6
    flat = x.double().reshape(2 if dim == 1 else 7, -1)
    given = None if counts is None else torch.tensor(counts).npu()
    y = torch_npu.npu_clipped_swiglu(
        x.npu(), group_index=given, dim=dim, alpha=1.5, limit=5.0, bias=0.5, interleaved=interleaved
    )
    gate, up = (flat[:, ::2], flat[:, 1::2]) if interleaved else flat.chunk(2, 1)
    gate = gate.clamp(max=5.0)
    exact = gate * (1.5 * gate).sigmoid() * (up.clamp(-5.0, 5.0) + 0.5)
    rows = min(sum(counts), len(flat)) if counts else len(flat)
    yield y.reshape(len(flat), -1)[:rows], Near(exact[:rows], 3)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@thorough(DTYPE, r"-float16-")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), list(parameters(__name__)))
def test_product(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)


def test_the_trace_counts_floating_point_operations() -> None:
    x, weight, groups = torch.ones(6, 32).npu(), torch.ones(2, 32, 16).npu(), torch.tensor([2, 6]).npu()
    with emulated_cann.trace() as trace:
        torch_npu.npu_grouped_matmul([x], [weight], group_list=groups, group_type=0, split_item=2)
        torch.npu.synchronize()
    assert [each.flops for each in trace.ran() if each.name == "GroupedMatmulV5"] == [2.0 * 6 * 32 * 16]


class TestGraph:
    """Replays read the inputs and the groups that are there then."""

    def test_products_of_rows(self) -> None:
        x, weight = torch.randn(12, 32).half(), torch.randn(4, 32, 16).half()
        on_device, given = x.npu(), in_layout(weight, "nz")
        listed = torch.tensor([3, 3, 3, 3]).npu()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            (y,) = torch_npu.npu_grouped_matmul(
                [on_device], [given], group_list=listed, group_list_type=1, group_type=0, split_item=2
            )
        for counts in ([3, 3, 3, 3], [0, 12, 0, 0], [1, 0, 0, 0], [5, 0, 4, 2]):
            x = torch.randn(12, 32).half()
            on_device.copy_(x)
            listed.copy_(torch.tensor(counts))
            before = y.cpu()
            graph.replay()
            groups = Grouped(torch.tensor(counts).cumsum(0).tolist(), 12, "counts")
            Near(products(x, weight, groups), 3).check(y[: groups.used].cpu())
            assert torch.equal(y[groups.used :].cpu().nan_to_num(), before[groups.used :].nan_to_num())
