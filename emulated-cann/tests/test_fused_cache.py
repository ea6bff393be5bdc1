"""Tests for cache writes and reads of the emulated CANN, through the real torch_npu, against the CPU.

Caches are filled with numbers first; unwritten parts must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import EXHAUSTIVE, thorough
from support.fused_draw import FLOATS, HALVES, Draw, Near, Pairs, Same, case, check, parameters
from support.fused_references import EPSILON, in_fractals, rms_norm, rope, written
from torch import Tensor

BLOCKS, BLOCK = 6, 16


def slots_for(draw: Draw, tokens: int, dtype: torch.dtype, skipped: bool) -> Tensor:
    slots = draw.permutation(BLOCKS * BLOCK)[:tokens].to(dtype)
    if skipped:
        slots[draw.below(tokens)] = -1
    return slots


@case(*FLOATS, torch.int32, depth=(1, 2, 3), index=(torch.int32, torch.int64))
def scatter_nd(draw: Draw, depth: int, index: torch.dtype) -> Pairs:
    shape = [draw.between(3, 6) for _ in range(3)]
    cells = torch.cartesian_prod(*(torch.arange(size) for size in shape[:depth])).view(-1, depth)
    indices = cells[draw.permutation(len(cells))[: draw.between(1, len(cells))]]
    numbers = draw.normal(*shape, dtype=torch.float32) * 9
    x, updates = (
        numbers.to(draw.dtype),
        (draw.normal(len(indices), *shape[depth:], dtype=torch.float32) * 9).to(draw.dtype),
    )
    on_npu = draw.strided(x)
    returned = torch_npu.npu_scatter_nd_update_(on_npu, indices.to(index).npu(), updates.npu())
    expected = x.clone()
    expected[tuple(indices.unbind(1))] = updates
    yield on_npu, Same(expected)
    yield returned, Same(expected)


@case(*HALVES, torch.int8, mode=("Norm", "PA_NZ"), index=(torch.int32, torch.int64), skipped=(False, True))
def scatter_paged(draw: Draw, mode: str, index: torch.dtype, skipped: bool) -> Pairs:
    tokens, heads = draw.between(1, 9), draw.between(1, 3)
    dims = 64, draw.choice([32, 64])
    rows = [draw.normal(tokens, heads, dim, dtype=torch.float32).mul(9).to(draw.dtype) for dim in dims]
    caches = [draw.normal(BLOCKS, BLOCK, heads * dim, dtype=torch.float32).mul(9).to(draw.dtype) for dim in dims]
    slots = slots_for(draw, tokens, index, skipped)
    shaped: Callable[[Tensor], Tensor] = (
        in_fractals if mode == "PA_NZ" else lambda cache: cache.unflatten(-1, (heads, -1))
    )
    on_npu = [shaped(cache).npu() for cache in caches]
    torch_npu.npu_scatter_pa_kv_cache(rows[0].npu(), rows[1].npu(), *on_npu, slots.npu(), cache_mode=mode)
    for cache, row, actual in zip(caches, rows, on_npu, strict=True):
        yield actual, Same(shaped(written(cache, row, slots)))


@case(*HALVES, offset=(False, True), sums=(False, True))
def gather_paged(draw: Draw, offset: bool, sums: bool) -> Pairs:
    heads, batch = draw.between(1, 3), draw.between(1, 3)
    caches = [draw.normal(BLOCKS, BLOCK, heads, 32), draw.normal(BLOCKS, BLOCK, heads, 64)]
    lengths = draw.integers(0, BLOCK, batch, dtype=torch.int32)
    starts = draw.integers(0, BLOCK, batch, dtype=torch.int32) if offset else torch.zeros(batch, dtype=torch.int32)
    table = draw.permutation(BLOCKS)[: 2 * batch].view(batch, 2).to(torch.int32)
    outputs = [torch.full((int(lengths.sum()), heads, cache.shape[-1]), 7, dtype=draw.dtype).npu() for cache in caches]
    given = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32) if sums else lengths
    torch_npu.npu_gather_pa_kv_cache(
        caches[0].npu(),
        caches[1].npu(),
        table.npu(),
        given.npu(),
        *outputs,
        seq_offset=starts.npu() if offset else None,
        is_seq_lens_cumsum=sums,
    )
    for cache, actual in zip(caches, outputs, strict=True):
        parts = [
            cache[row.long()].flatten(0, 1)[start : start + length]
            for row, start, length in zip(table, starts, lengths, strict=True)
        ]
        yield actual, Same(torch.cat(parts))


@case(*HALVES, skipped=(False, True), outputs=(False, True))
def qkv_norm_rope(draw: Draw, skipped: bool, outputs: bool) -> Pairs:
    tokens, dim, key_heads = draw.between(1, 9), 128, draw.between(1, 2)
    heads = [key_heads * draw.between(1, 3), key_heads, key_heads]
    qkv, gammas = draw.normal(tokens, sum(heads) * dim), [draw.positive(dim) for _ in range(2)]
    cos, sin = draw.normal(tokens, dim), draw.normal(tokens, dim)
    caches = [draw.normal(BLOCKS, BLOCK, key_heads * dim) for _ in range(2)]
    slots = slots_for(draw, tokens, torch.int64, skipped)
    query, on_npu = (
        torch.full((tokens, heads[0] * dim), 7, dtype=draw.dtype).npu(),
        [in_fractals(cache).npu() for cache in caches],
    )
    before = torch_npu.npu_qkv_rms_norm_rope_cache(
        qkv.npu(),
        gammas[0].npu(),
        gammas[1].npu(),
        cos.npu(),
        sin.npu(),
        slots.npu(),
        query,
        *on_npu,
        [1, tokens, sum(heads), dim],
        heads,
        epsilon=EPSILON,
        is_output_qkv=outputs,
    )
    parts = qkv.unflatten(1, (-1, dim)).split(heads, 1)
    done = [
        rope(rms_norm(part, gamma)[0], cos[:, None], sin[:, None]).flatten(1)
        for part, gamma in zip(parts, gammas, strict=False)
    ]
    yield query, Near(done[0], 3)
    yield on_npu[0], Near(in_fractals(written(caches[0].double(), done[1], slots).to(draw.dtype)), 3)
    yield on_npu[1], Same(in_fractals(written(caches[1], parts[2].flatten(1), slots)))
    if outputs:
        for actual, expected in zip(before, [*done, parts[2].flatten(1)], strict=True):
            yield actual, Near(expected, 3)


@case(*HALVES, mode=("Norm", "PA", "PA_NZ"), skipped=(False, True))
def latent_norm_rope(draw: Draw, mode: str, skipped: bool) -> Pairs:
    batch, length = draw.between(1, 3), draw.between(1, 4)
    kv, gamma = draw.normal(batch, 1, length, 576), draw.positive(512)
    cos, sin = draw.normal(batch, 1, length, 64), draw.normal(batch, 1, length, 64)
    blocks = batch if mode == "Norm" else BLOCKS
    caches = [draw.normal(blocks, BLOCK, dim) for dim in (64, 512)]
    if mode == "Norm":
        index = torch.stack([draw.permutation(BLOCK)[:length] for _ in range(batch)])
        slots = (index + torch.arange(batch)[:, None] * BLOCK).flatten()
    else:
        index = slots = slots_for(draw, batch * length, torch.int64, skipped)
    shaped: Callable[[Tensor], Tensor] = {
        "Norm": lambda cache: cache.unsqueeze(1),
        "PA": lambda cache: cache.unsqueeze(2),
        "PA_NZ": lambda cache: in_fractals(cache).view(cache.shape[0], BLOCK, 1, -1),
    }[mode]
    on_npu = [shaped(cache).npu() for cache in caches]
    key, latent = torch_npu.npu_kv_rmsnorm_rope_cache_v2(
        kv.npu(),
        gamma.npu(),
        cos.npu(),
        sin.npu(),
        index.npu(),
        *on_npu,
        epsilon=EPSILON,
        cache_mode=mode,
        is_output_kv=True,
    )
    expected = [
        rope(kv[..., 512:].unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2), cos, sin),
        rms_norm(kv[..., :512], gamma)[0],
    ]
    for actual, result, cache, rows in zip(on_npu, (key, latent), caches, expected, strict=True):
        yield result, Near(rows, 3)
        yield actual, Near(shaped(written(cache.double(), rows.flatten(0, 2), slots).to(draw.dtype)), 3)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize(("run", "arguments", "dtype", "seed"), list(parameters(__name__)))
def test_cache(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    check(run, arguments, dtype, seed)
