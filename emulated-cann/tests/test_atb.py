"""Tests for ATB's paged attention and cache write on the emulated CANN, through the real torch_npu, against the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import EXHAUSTIVE, thorough
from support import ROOT, TESTS
from support.children import ends_well
from support.fused_draw import HALVES, ROUNDING, Draw, soil_memory
from support.fused_references import attention, in_fractals, written
from support.ones import bf16, f32, half, i32, i64
from support.refusals import Row
from torch import Tensor

pytestmark = pytest.mark.usefixtures("internal_formats")

SEEDS = (0, 1)
BLOCKS = 12
FRACTAL_NZ = 29


def cache_on_npu(cache: Tensor, heads: int, fractal: bool) -> Tensor:
    """Copy a cache to the NPU as [blocks, block_size, H], as ATB takes it: by heads, or in FRACTAL_NZ tiles."""
    if not fractal:
        return cache.unflatten(-1, (heads, -1)).npu()
    cast = torch_npu.npu_format_cast(in_fractals(cache).npu(), FRACTAL_NZ)
    assert torch_npu.get_npu_format(cast) == FRACTAL_NZ
    return cast


class Paged:
    """A batch with one query per sequence, and its cache."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        seed: int,
        fractal: bool = False,
        dims: tuple[int, int] | None = None,
        block: int | None = None,
    ) -> None:
        draw = self.draw = Draw(name, dtype, seed)
        self.batch, self.kv_heads, self.dim = draw.between(1, 4), draw.between(1, 2), draw.choice([64, 128])
        self.dim, value_dim = dims or (self.dim, self.dim)
        self.heads, self.block = self.kv_heads * draw.choice([1, 4]), block or 16 * draw.between(1, 4)
        self.query = draw.normal(self.batch, self.heads, self.dim)
        self.caches = [draw.normal(BLOCKS, self.block, self.kv_heads * dim) for dim in (self.dim, value_dim)]
        self.table = draw.permutation(BLOCKS)[: 3 * self.batch].view(self.batch, 3).to(torch.int32)
        self.scale = self.dim**-0.5
        self.lengths = [draw.between(0, 3 * self.block) for _ in range(self.batch)]
        self.out = torch.full((self.batch, self.heads, value_dim), torch.nan, dtype=dtype, device="npu")
        self.tensors = [self.query.npu(), *(cache_on_npu(cache, self.kv_heads, fractal) for cache in self.caches)]

    def arguments(self) -> tuple[Any, ...]:
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        return (*self.tensors, self.kv_heads, self.heads, self.scale, self.table.npu(), lengths, self.out)

    def check(self) -> None:
        bound = 2 * ROUNDING[self.query.dtype]
        found = self.out.cpu().double()
        for one, query, row, length in zip(found, self.query, self.table.long(), self.lengths, strict=True):
            key, value = (
                cache[row].flatten(0, 1)[:length].unflatten(-1, (self.kv_heads, -1)).transpose(0, 1)
                for cache in self.caches
            )
            expected, _ = attention(query[:, None], key, value, self.scale, torch.zeros(1, length, dtype=torch.bool))
            torch.testing.assert_close(one, expected[:, 0], rtol=bound, atol=bound)


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", range(6), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("fractal", [False, True], ids=["nd", "nz"])
@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_paged_attention(dtype: torch.dtype, fractal: bool, seed: int) -> None:
    paged = Paged("paged", dtype, seed, fractal)
    soil_memory()
    torch_npu._npu_paged_attention(*paged.arguments())
    paged.check()


WIDTHS = [((288, 96), 128), ((576, 512), 64), ((96, 288), 16), ((256, 256), 256), ((128, 96), 256), ((40, 40), 32)]


@pytest.mark.parametrize(("dims", "block"), WIDTHS, ids=str)
def test_the_widths_of_keys_and_values(dims: tuple[int, int], block: int) -> None:
    """For the widths that A2 and A3 support, see the sources in atb/paged_attention.cpp."""
    paged = Paged("widths", torch.float16, 0, dims=dims, block=block)
    torch_npu._npu_paged_attention(*paged.arguments())
    paged.check()


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
def test_with_a_workspace(seed: int) -> None:
    paged = Paged("workspace", torch.float16, seed)
    workspace = torch_npu._npu_paged_attention_get_workspace(*paged.arguments())
    assert workspace.numel() > 0
    torch_npu._npu_paged_attention(*paged.arguments(), workspace=workspace)
    paged.check()


def test_reshape_and_cache_of_int8_keys_in_fractals() -> None:
    """Together with values of another dtype and width, as in latent attention."""
    draw = Draw("reshape int8", torch.bfloat16, 0)
    key, value = draw.integers(-128, 127, 5, 1, 512, dtype=torch.int8), draw.normal(5, 1, 64)
    slots = draw.permutation(BLOCKS * 128)[:5].to(torch.int32)
    caches = [draw.integers(-128, 127, BLOCKS, 128, 512, dtype=torch.int8), draw.normal(BLOCKS, 128, 64)]
    on_npu = [cache_on_npu(cache, 1, True) for cache in caches]
    torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *on_npu, slots.npu())
    for actual, cache, row in zip(on_npu, caches, (key, value), strict=True):
        plain = torch_npu.npu_format_cast(actual, 2).cpu()
        assert torch.equal(plain, in_fractals(written(cache, row, slots)))


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize("seed", SEEDS, ids=["seed0", "seed1"])
@pytest.mark.parametrize("skipped", [False, True], ids=["all", "skipped"])
@pytest.mark.parametrize("fractal", [False, True], ids=["nd", "nz"])
@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
def test_reshape_and_cache(dtype: torch.dtype, fractal: bool, skipped: bool, seed: int) -> None:
    draw = Draw("reshape", dtype, seed)
    tokens, heads, dim = draw.between(1, 9), draw.between(1, 3), draw.choice([32, 64])
    rows = [draw.normal(tokens, heads, dim) for _ in range(2)]
    caches = [draw.normal(BLOCKS, 16, heads * dim) for _ in range(2)]
    slots = draw.permutation(BLOCKS * 16)[:tokens].to(torch.int32)
    if skipped:
        slots[draw.below(tokens)] = -1
    on_npu = [cache_on_npu(cache, heads, fractal) for cache in caches]
    torch_npu._npu_reshape_and_cache(draw.strided(rows[0]), draw.strided(rows[1]), *on_npu, slots.npu())
    for actual, cache, row in zip(on_npu, caches, rows, strict=True):
        expected = written(cache, row, slots)
        plain = torch_npu.npu_format_cast(actual, 2).cpu()
        torch.testing.assert_close(
            plain, in_fractals(expected) if fractal else expected.unflatten(-1, (heads, -1)), rtol=0, atol=0
        )


def test_a_captured_cache_write_takes_the_slots_of_each_replay() -> None:
    draw = Draw("captured", torch.float16, 0)
    key, cache = draw.normal(3, 2, 32), draw.normal(BLOCKS, 16, 64)
    on_npu = [cache_on_npu(cache, 2, False) for _ in range(2)]
    rows, slots, graph = key.npu(), torch.tensor([0, 1, 2], dtype=torch.int32).npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch_npu._npu_reshape_and_cache(rows, rows, *on_npu, slots)
    expected = cache
    for _ in range(3):
        chosen = draw.permutation(BLOCKS * 16)[:3].to(torch.int32)
        slots.copy_(chosen.npu())
        graph.replay()
        expected = written(expected, key, chosen)
    for actual in on_npu:
        torch.testing.assert_close(actual.cpu(), expected.unflatten(-1, (2, -1)), rtol=0, atol=0)


def paged_call(**changes: Any) -> None:
    cache, table = half(4, 16, 2, 64), i32(2, 2)
    names = "query", "key_cache", "value_cache", "num_kv_heads", "num_heads", "scale_value", "block_table"
    arguments = dict(zip(names, (half(2, 4, 64), cache, cache, 2, 4, 1.0, table), strict=True))
    arguments |= {"context_lens": torch.tensor([3, 32], dtype=torch.int32), "out": half(2, 4, 64)}
    torch_npu._npu_paged_attention(**{**arguments, **changes})


def cache_call(**changes: Any) -> None:
    rows, caches = half(2, 2, 64), {"key_cache": half(4, 16, 2, 64), "value_cache": half(4, 16, 2, 64)}
    slots = torch.tensor([0, 1], dtype=torch.int32).npu()
    torch_npu._npu_reshape_and_cache(**{"key": rows, "value": rows, **caches, "slot_indices": slots, **changes})


def wide(dim: int, value_dim: int, block: int) -> dict[str, Any]:
    """Return arguments of ``paged_call`` for these head dimensions and this block size."""
    caches = {"key_cache": half(4, block, 2, dim), "value_cache": half(4, block, 2, value_dim)}
    return {"query": half(2, 4, dim), "out": half(2, 4, value_dim), **caches}


def refusals() -> Iterator[Row]:
    yield paged_call, {"context_lens": i32(2)}, "context_lens must be a CPU tensor"
    yield paged_call, {"context_lens": i32(3).cpu()}, "one length for each of the 2 sequences"
    yield paged_call, {"context_lens": i64(2).cpu()}, "context_lens must be int32"
    yield paged_call, {"context_lens": i32(2).cpu() * 33}, "but must be between 0 and 32"
    yield paged_call, {"block_table": i64(2, 2)}, "block_table must be int32"
    yield paged_call, {"num_kv_heads": 3}, "num_heads, 4, must be a multiple of num_kv_heads, 3"
    yield paged_call, {"query": f32(2, 4, 64)}, "query must be float16 or bfloat16"
    large = "at most 16384, but D of the keys is 64, D of the values 64, block_size 272"
    yield paged_call, {"key_cache": half(4, 272, 2, 64), "value_cache": half(4, 272, 2, 64)}, large
    yield paged_call, wide(592, 592, 16), "the head dimensions must be at most 576, but D of the keys is 592"
    yield paged_call, wide(288, 96, 144), "block_size must be at most 128 with a head dimension above 256"
    yield paged_call, wide(96, 288, 256), "block_size must be at most 128 with a head dimension above 256"
    yield paged_call, wide(256, 256, 144), "block_size must be a multiple of 128 with head dimensions of 256"
    yield paged_call, wide(64, 64, 24), "block_size must be a multiple of 16, but is 24"
    yield paged_call, {"value_cache": half(3, 16, 2, 64)}, "the same number of blocks and block_size"
    yield paged_call, {"value_cache": half(4, 16, 1, 128)}, "value_cache must have shape"
    fractal = cache_on_npu(torch.ones(4, 272, 128).half(), 2, True)
    yield paged_call, {"key_cache": fractal, "value_cache": fractal}, "in FRACTAL_NZ, D must be the same for keys and"
    yield cache_call, {"slot_indices": i64(2)}, "slots must be int32"
    yield cache_call, {"slot_indices": i32(3)}, r"slots must have shape \[2\]"
    yield cache_call, {"key_cache": half(4, 16, 2, 32)}, "key_cache must have shape"
    yield cache_call, {"key_cache": half(4, 16, 128)}, "and its cache 4 dimensions"
    wrong = "key must be float16, bfloat16 or int8, not Float"
    yield cache_call, {"key": f32(2, 2, 64), "key_cache": f32(4, 16, 2, 64)}, wrong
    fewer = {"value": half(2, 1, 64), "value_cache": half(4, 16, 1, 64)}
    yield cache_call, fewer, "the same number of tokens and heads"
    yield cache_call, {"value_cache": half(5, 16, 2, 64)}, "the same number of blocks and block_size"
    yield cache_call, {"key": bf16(2, 2, 64)}, "key and its cache must have the same dtype"


CHILD = """
import sys
sys.path[:0] = sys.argv[1:]
import test_atb, torch  # torch_npu, and CANN with it, comes by the environment
from support.refusals import check_refused, check_works
torch.npu.config.allow_internal_format = True
check_refused(test_atb.refusals())
check_works((test_atb.paged_call, test_atb.cache_call))  # The process keeps working.
print("well")
"""


def test_refusals() -> None:
    """In a subprocess without torch_npu's queue, which a failed operation makes unusable."""
    ends_well("-c", CHILD, str(TESTS), str(ROOT / "tests"), TASK_QUEUE_ENABLE="0")
