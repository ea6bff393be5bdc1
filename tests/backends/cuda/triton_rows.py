"""Triton's kernels of rows and of the cache against the references. Run by test_triton_kernels.py, in a process of its
own."""

from __future__ import annotations

import pytest
import torch
from hal.backends.triton import KERNELS
from helpers.triton_checking import (
    DEVICE,
    DTYPES,
    EXPERTS,
    RECURRENT,
    by_turns,
    check,
    clones,
    every_dtype,
    moved,
)

from hal import ops
from hal.errors import OperationError
from hal.ops import Draw
from hal.ops.tolerance import assert_agree

WIDTHS = (1, 3, 80, 1025, 2100)


@by_turns("name", sorted(KERNELS.keys() - EXPERTS - RECURRENT - {"linear", "paged_attention"}))
def test_declared_samples(name: str, dtype: torch.dtype) -> None:
    cases = 0
    for sample in ops.operation(name).samples(Draw(dtype, seed=0)):
        check(name, dtype, sample)
        cases += 1
    assert cases > 2


@pytest.mark.parametrize("width", WIDTHS)
def test_any_width(width: int) -> None:
    dtype = DTYPES[width % 3]
    draw = Draw(dtype, seed=width)
    for rows in (0, 1, 3) if width == 80 else (3,):
        x, residual, weight = draw.normal(rows, width), draw.normal(rows, width), draw.normal(width)
        scale, offset = draw.tensor([0.04], torch.float32), draw.tensor([3], torch.int32)
        merged = draw.normal(rows, 2 * width)
        check("rms_norm", dtype, (x, weight, 1e-6))
        check("add_rms_norm", dtype, (x, residual, weight, 1e-6))
        check("add_rms_norm_quantize", dtype, (x, residual, weight, 1e-6, scale, offset))
        check("add_rms_norm_dynamic_quantize", dtype, (x, residual, weight, 1e-6))
        check("quantize", dtype, (x, scale, offset))
        check("dynamic_quantize", dtype, (x,))
        check("silu_and_mul", dtype, (merged,))
        check("silu_and_mul_quantize", dtype, (merged, scale, offset))
        check("silu_and_mul_dynamic_quantize", dtype, (merged,))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_streams_wider_than_a_tile(count: int) -> None:
    """And without tokens, and that are not contiguous."""
    options, width = ops.HyperConnectionOptions(1e-5, 1e-3, 3), 1500
    draw, rows = Draw(torch.bfloat16, seed=count), options.rows(count)
    projection = draw.normal(rows, count * width, scale=0.02).float()
    weights = draw.normal(2, count).float(), draw.normal(2, count, count).float()
    streams, output = draw.normal(2, width, count).transpose(1, 2), draw.normal(2, 2 * width)[:, :width]
    for end in (0, 2):
        given = projection, draw.normal(rows).float(), draw.normal(3).float(), options
        check("collapse_streams", torch.bfloat16, (streams[:end], *given))
        each = (tensor[:end] for tensor in (output, *weights))
        check("expand_streams", torch.bfloat16, (streams[:end], *each))


def test_rows_that_are_not_contiguous() -> None:
    dtype = torch.bfloat16
    draw = Draw(dtype, seed=1)
    packed, weight = draw.normal(6, 7 * 80), draw.normal(80)
    heads = packed.unflatten(1, (7, 80))
    scale = draw.tensor([0.04], torch.float32)
    for view in (heads[:, 2:5], heads[::2, 1:], heads[:, :1], packed[:, 80:160], heads.transpose(0, 1), heads[1, 2]):
        check("rms_norm", dtype, (view, weight, 1e-6))
        check("quantize", dtype, (view, scale, None))
        check("add_rms_norm", dtype, (view, view.flip(0), weight, 1e-6))
        if view.dim() > 1:
            check("dynamic_quantize", dtype, (view,))
            check("silu_and_mul_dynamic_quantize", dtype, (view,))
        check("silu_and_mul", dtype, (view,))
    check("rms_norm", dtype, (draw.normal(2, 3, 2, 5, 64)[:, 1:], draw.normal(192)[::3], 1e-6))


@every_dtype
def test_large_and_small_values(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=2)
    largest = torch.finfo(dtype).max
    for scale in (1e-7, 1e3, 3e4):
        x, weight = draw.normal(4, 96).clamp(-largest / 3e4, largest / 3e4) * scale, draw.normal(96)
        check("rms_norm", dtype, (x, weight, 1e-6))
        check("add_rms_norm", dtype, (x / 2, x.flip(0) / 4, weight, 1e-6))
        check("dynamic_quantize", dtype, (x,))
        check("quantize", dtype, (x, draw.tensor([0.5], torch.float32), draw.tensor([9], torch.int32)))
    steep = draw.tensor([[-300.0, -104.0, -88.5, -20.0, 0.0, 20.0, 89.0, 300.0] + [1.5] * 8], dtype)
    check("silu_and_mul", dtype, (steep,))


@every_dtype
def test_the_norm_reads_the_rounded_sum(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=6)
    x, residual, weight = moved((draw.normal(9, 256), draw.normal(9, 256), draw.normal(256)))
    normed, hidden = KERNELS["add_rms_norm"](x, residual, weight, 1e-6)
    assert torch.equal(hidden, x + residual)
    # On a GPU, two compilations of a sum may contract differently, which changes few elements by one rounding.
    assert (normed == KERNELS["rms_norm"](hidden, weight, 1e-6)).float().mean() > 0.95


@every_dtype
def test_the_rotation_reads_the_rounded_norm(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=7)
    angles = draw.normal(9, 32).float().repeat(1, 2)
    qkv, weight, cos, sin = moved(
        (draw.normal(9, 4 * 64), draw.normal(64), angles.cos().to(dtype), angles.sin().to(dtype))
    )
    query, key, _ = qkv.unflatten(1, (4, 64)).split((2, 1, 1), 1)
    normed = (KERNELS["rms_norm"](each, weight, 1e-6) for each in (query, key))
    turned = KERNELS["rotary_embedding"](*normed, cos, sin)
    found = KERNELS["split_qkv_rmsnorm_rope"](qkv, weight, weight, cos, sin, 1e-6, 2, 1)[:2]
    # A different order of summation changes few elements by one rounding; in float32, more.
    least = 0.5 if dtype is torch.float32 else 0.95
    assert all((one == other).float().mean() > least for one, other in zip(found, turned, strict=True))


@every_dtype
def test_half_rounds_to_even(dtype: torch.dtype) -> None:
    halves = torch.arange(-131, 131).to(dtype)[:, None] + 0.5
    for offset in (None, torch.tensor([2], dtype=torch.int32)):
        found = check("quantize", dtype, (halves, torch.ones(1), offset))
        wanted = ops.operation("quantize").reference(halves, torch.ones(1), offset)
        assert torch.equal(found.cpu(), wanted)


@every_dtype
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_row_alone(broken: float, dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=3)
    x, weight = draw.normal(5, 64), draw.normal(64)
    x[1, 5] = broken
    for name, sample in {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, draw.normal(5, 64), weight, 1e-6),
        "silu_and_mul": (x,),
    }.items():
        found = KERNELS[name](*moved(sample))
        wanted = ops.operation(name).reference(*sample)
        for one, other in zip(
            *((each if isinstance(each, tuple) else (each,)) for each in (found, wanted)), strict=True
        ):
            assert_agree(ops.operation(name), dtype, one, other, equal_nan=True)
            assert not one[1].isfinite().all()
    for name, sample in {
        "dynamic_quantize": (x,),
        "silu_and_mul_dynamic_quantize": (x,),
        "add_rms_norm_dynamic_quantize": (x, draw.normal(5, 64), weight, 1e-6),
    }.items():
        found, wanted = KERNELS[name](*moved(sample)), ops.operation(name).reference(*sample)
        assert found[1].isfinite().tolist() == wanted[1].isfinite().tolist(), name
        others = [0, 2, 3, 4]
        assert (found[0].cpu()[others].int() - wanted[0][others].int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"), [(1, 1, 2), (7, 7, 6), (14, 2, 64), (8, 1, 80), (20, 5, 128), (4, 2, 256)]
)
def test_heads_of_any_shape(num_heads: int, kv_heads: int, head_dim: int) -> None:
    dtype = DTYPES[num_heads % 3]
    draw = Draw(dtype, seed=head_dim)
    for tokens in (0, 1, 3):
        # Wider rows than the projection's, as in a slice of a wider tensor.
        width = (num_heads + 2 * kv_heads) * head_dim
        qkv = draw.normal(tokens, width + 16)[:, :width]
        query, key, value = qkv.unflatten(1, (-1, head_dim)).split((num_heads, kv_heads, kv_heads), 1)
        angles = draw.normal(tokens, head_dim // 2).float().repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = draw.normal(head_dim), draw.normal(head_dim)
        blocks = (2, 4, kv_heads, head_dim)
        slots = draw.permutation(8)[:tokens]
        caches = draw.normal(*blocks), draw.normal(*blocks)
        check("rotary_embedding", dtype, (query, key, cos, sin))
        check("split_qkv_rmsnorm_rope", dtype, (qkv, *weights, cos, sin, 1e-6, num_heads, kv_heads))
        check(
            "split_qkv_rmsnorm_rope_cache", dtype, (qkv, *weights, cos, sin, 1e-6, num_heads, kv_heads, *caches, slots)
        )
        check("store_kv_cache", dtype, (key, value, *caches, slots))
        check("store_kv_cache", dtype, (key, value, *caches, slots.long()))


@every_dtype
def test_angles_may_be_views(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=5)
    query, key = draw.normal(3, 4, 64), draw.normal(3, 2, 64)
    angles = draw.normal(1, 32).float().repeat(1, 2)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).expand(3, -1)  # one row for all tokens: cos, then sin
    check("rotary_embedding", dtype, (query, key, table[:, :64], table[:, 64:]))


@every_dtype
def test_padding_tokens_share_a_slot(dtype: torch.dtype) -> None:
    draw = Draw(dtype, seed=4)
    key, value = draw.normal(6, 2, 64), draw.normal(6, 2, 64)
    caches = draw.normal(3, 8, 2, 64), draw.normal(3, 8, 2, 64)
    slots = torch.tensor([9, 0, 23, 0, 0, 16], dtype=torch.int32)
    found = moved(clones(caches))
    KERNELS["store_kv_cache"](*moved((key, value)), *found, slots.to(DEVICE))
    for new, old, written in zip(found, caches, (key, value), strict=True):
        expected = old.clone().view(24, 2, 64)
        for token in (0, 2, 5):
            expected[slots[token]] = written[token]
        kept = new.cpu().view(24, 2, 64)
        assert torch.equal(kept[1:], expected[1:])
        # Programs of a GPU write at the same time, each element from one of the tokens.
        assert sum(kept[0] == written[token] for token in (1, 3, 4)).bool().all()


def test_what_does_not_fit_is_refused() -> None:
    draw = Draw(seed=0)
    x, cos = draw.normal(3, 64), draw.normal(3, 64)
    heads, cache, slots = draw.normal(3, 2, 64), draw.normal(2, 4, 2, 64), torch.zeros(3, dtype=torch.int32)
    for name, sample in (
        ("rms_norm", (x, draw.normal(63), 1e-6)),
        ("rms_norm", (x, draw.normal(64).half(), 1e-6)),
        ("rms_norm", (x.int(), draw.normal(64).int(), 1e-6)),
        ("add_rms_norm", (x, x[:2], draw.normal(64), 1e-6)),
        ("silu_and_mul", (draw.normal(3, 63),)),
        ("quantize", (x, torch.ones(2), None)),
        ("quantize", (x, torch.ones(1), torch.zeros(64, dtype=torch.int32))),
        ("dynamic_quantize", (x[0],)),
        ("rotary_embedding", (heads, heads[:2], cos, cos)),
        ("rotary_embedding", (heads, heads, cos[:, :31], cos[:, :31])),
        ("split_qkv_rmsnorm_rope", (x, x[0], x[0], cos, cos, 1e-6, 2, 1)),
        ("store_kv_cache", (heads, heads[:2], cache, cache, slots)),
        ("store_kv_cache", (heads, heads, cache[:, :, :1], cache[:, :, :1], slots)),
        ("store_kv_cache", (heads, heads, cache, cache, slots[:2])),
        ("store_kv_cache", (heads, heads, cache.transpose(0, 1), cache.transpose(0, 1), slots)),
    ):
        with pytest.raises(OperationError, match=f"{name} was given"):
            KERNELS[name](*moved(sample))
