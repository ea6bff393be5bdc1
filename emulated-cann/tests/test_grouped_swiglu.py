"""Grouped products with SwiGLU and quantization on the emulated CANN: weights as tiles of FRACTAL_NZ, and int4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import EXHAUSTIVE, thorough
from support.fused_draw import Draw, Near, Pairs, Rounded, case, check, parameters
from support.grouped import Grouped, in_layout, int8s, packed_int4, rows_of
from torch import Tensor

pytestmark = pytest.mark.usefixtures("internal_formats")

TILES = ("nz", "view of tiles", "tiles")


def int4s(draw: Draw, *shape: int) -> Tensor:
    return draw.integers(-8, 7, *shape, dtype=torch.int8)


def in_tiles(weight: Tensor) -> Tensor:
    """Return int8 or int32 matrices as tiles of 16 rows of 32 bytes: [E, N / C0, K / 16, 16, C0]."""
    row = 32 // weight.element_size()
    return weight.unflatten(2, (-1, row)).unflatten(1, (-1, 16)).permute(0, 3, 1, 2, 4).contiguous()


def laid_out(weight: Tensor, layout: str) -> Tensor:
    if layout == "tiles":  # the tensor says ND
        return in_tiles(weight).npu()
    if layout == "view of tiles":  # int4 is cast as bytes
        return in_layout(weight.view(torch.int8), "nz").view(weight.dtype).view(in_tiles(weight).shape)
    return in_layout(weight, layout)


def gated(x: Tensor, weight: Tensor, by_token: Tensor, groups: Grouped, more: Tensor | None = None) -> Tensor:
    """Return the products with SwiGLU, float64, of scaled weights, with `more` added to those of each expert."""

    def of_group(expert: int, begin: int, end: int) -> Tensor:
        sums = x[begin:end].double() @ weight[expert].double()
        return (sums if more is None else sums + more[expert].double()) * by_token[begin:end, None].double()

    gate, up = rows_of(groups, of_group).chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def quantized(y: Tensor, y_scale: Tensor, exact: Tensor) -> Pairs:
    largest = exact.abs().amax(1)
    assert y.dtype == torch.int8
    yield y_scale[: len(exact)], Near(largest / 127, 3)
    yield y[: len(exact)], Rounded(torch.where(largest[:, None] == 0, 0, exact / largest[:, None] * 127))


def launch(
    version: int, x: Tensor, weight: Tensor, scale: Tensor, by_token: Tensor, groups: Grouped, **more: Any
) -> Any:
    if version == 1:
        return torch_npu.npu_grouped_matmul_swiglu_quant(
            x.npu(), weight, groups.listed().npu(), scale.npu(), by_token.npu(), **more
        )[:2]
    return torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x.npu(), [weight], [scale.npu()], by_token.npu(), **groups.arguments(), **more
    )


@case(torch.float32, version=(1, 2), layout=TILES)
def of_int8(draw: Draw, version: int, layout: str) -> Pairs:
    groups = Grouped.drawn(draw, draw.choice(Grouped.SPREADS), "ends")
    k, n = 16 * draw.between(1, 9), 64 * draw.between(1, 3)
    x, weight = int8s(draw, groups.rows, k), int8s(draw, groups.count, k, n)
    scale, by_token = draw.positive(groups.count, n) / 4000, draw.positive(groups.rows)
    y, y_scale = launch(version, x, laid_out(weight, layout), scale, by_token, groups)
    yield from quantized(y, y_scale, gated(x, weight * scale[:, None], by_token, groups))


@case(torch.float32, version=(1, 2), layout=(*TILES, "nd"), by_group=(False, True))
def of_int8_with_int4_weights(draw: Draw, version: int, layout: str, by_group: bool) -> Pairs:
    """A kernel multiplies x - 8, in two halves of four bits; the assist matrix, made beforehand, adds the rest."""
    if (version, layout) == (1, "nd"):
        layout = "nz"
    groups = Grouped.drawn(draw, draw.choice(Grouped.SPREADS), "ends" if version == 1 else "counts")
    k, n = 64 * draw.between(1, 3), 64 * draw.between(1, 3)
    x, weight = int8s(draw, groups.rows, k), int4s(draw, groups.count, k, n)
    scale = draw.positive(groups.count, 4 if by_group else 1, n) / 300
    scaled = weight.double() * scale.repeat_interleave(k // scale.shape[1], 1)
    more, by_token = draw.normal(groups.count, n), draw.positive(groups.rows)
    assist = (8 * scaled.sum(1) + more).float().npu()
    packed = scale.view(torch.int32).long() & 0xFFFFFFFF
    options: dict[str, Any] = {"bias": assist}
    if version == 2:
        options = {"weight_assist_matrix": [assist], "dequant_mode": int(by_group)}
    y, y_scale = launch(
        version,
        x,
        laid_out(packed_int4(weight), layout),
        packed if by_group else packed.squeeze(1),
        by_token,
        groups,
        **options,
    )
    yield from quantized(y, y_scale, gated(x, scaled, by_token, groups, more))


@case(torch.float32, layout=("nd", *TILES, "transposed", "nz transposed"), smooth=(None, 1, 2), packed=(False, True))
def of_int4(draw: Draw, layout: str, smooth: int | None, packed: bool) -> Pairs:
    groups = Grouped.drawn(draw, draw.choice(Grouped.SPREADS), draw.choice(["ends", "counts"]))
    k, n = 64 * draw.between(1, 3), 64 * draw.between(1, 3)
    x, weight = int4s(draw, groups.rows, k), int4s(draw, groups.count, k, n)
    scale, by_token = draw.positive(groups.count, n) / 40, draw.positive(groups.rows)
    if layout.endswith("transposed"):
        given = laid_out(packed_int4(weight.mT), layout.removesuffix("transposed").strip() or "nd").transpose(1, 2)
    else:
        given = laid_out(packed_int4(weight), layout)
    factors = None if smooth is None else draw.positive(groups.count, *[n // 2][: smooth - 1])
    y, y_scale = launch(
        2,
        packed_int4(x),
        given,
        scale.view(torch.int32).long() if packed else scale,
        by_token,
        groups,
        smooth_scale=None if factors is None else factors.npu(),
    )
    exact = gated(x, weight * scale[:, None], by_token, groups)
    if factors is not None:
        exact = exact * factors[groups.experts()].double().view(len(exact), -1)
    yield from quantized(y, y_scale, exact)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), list(parameters(__name__)))
def test_product(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)
