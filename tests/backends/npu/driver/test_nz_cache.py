"""Tests for the KV cache in FRACTAL_NZ: kernels against the references in the canonical layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import emulated_cann
import pytest
import torch
from helpers.checkpoints import random_checkpoint
from helpers.kernel_checks import on_cpu
from helpers.npu.drawn import attention_arguments, drawn_attention
from helpers.thorough import EXHAUSTIVE, thorough
from torch import Tensor

import hal
from hal import ops
from hal.errors import ConfigError, OperationError
from hal.ops import Draw, Sample
from hal.ops.tolerance import assert_agree
from hal.step import StateSpec

DTYPES = (torch.float16, torch.bfloat16)
TILE = 16

Opened = Callable[..., hal.Backend]


def to_tiles(cache: Tensor) -> Tensor:
    """Convert a canonical cache to FRACTAL_NZ memory: [blocks, heads * dim / 16, block_size, 16]."""
    blocks, block_size, heads, head_dim = cache.shape
    tiles = cache.view(blocks, block_size, heads * head_dim // TILE, TILE).transpose(1, 2)
    return tiles.contiguous().view(cache.shape)


def from_tiles(cache: Tensor) -> Tensor:
    """Convert FRACTAL_NZ memory to the canonical cache."""
    blocks, block_size, heads, head_dim = cache.shape
    tiles = cache.view(blocks, heads * head_dim // TILE, block_size, TILE).transpose(1, 2)
    return tiles.contiguous().view(cache.shape)


def check(backend: hal.Backend, name: str, dtype: torch.dtype, sample: Sample, *, rounded_once: bool = False) -> None:
    """Run a kernel on the caches of the canonical ``sample``, converted to FRACTAL_NZ and back.

    With ``rounded_once``, compare with the reference computed in float32.
    """
    operation, names = ops.operation(name), list(ops.operation(name).signature.parameters)
    places = [names.index(cache) for cache in ("key_cache", "value_cache")]
    reference, ours = list(on_cpu(sample)), list(sample)
    for place in places:
        ours[place] = to_tiles(sample[place])
    if rounded_once:
        reference = [
            value.float() if isinstance(value, Tensor) and value.dtype is dtype else value for value in reference
        ]
    found, expected = getattr(backend.ops, name)(*ours), operation.reference(*reference)
    if rounded_once:
        expected = expected.to(dtype)
        reference = [
            value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value for value in reference
        ]
    assert_agree(operation, dtype, found, expected)
    for place, (parameter, value) in enumerate(zip(names, ours, strict=True)):
        if place in places and parameter in operation.mutates:
            assert_agree(operation, dtype, from_tiles(value), reference[place], parameter)
        elif isinstance(value, Tensor):
            after = from_tiles(value) if place in places else value
            assert torch.equal(after.cpu().nan_to_num(), reference[place].nan_to_num()), f"{parameter} was written"


@pytest.fixture
def fractal(npu: Opened) -> hal.Backend:
    return npu(options={"nz_cache": True})


def samples_of_128(draw: Draw) -> list[Sample]:
    """Return samples of split_qkv_rmsnorm_rope_cache with the only head dimension that the kernel accepts."""
    samples = ops.operation("split_qkv_rmsnorm_rope_cache").samples(draw)
    return [sample for sample in samples if sample[1].shape[0] == 128]


def written(draw: Draw, tokens: int, kv_heads: int, head_dim: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return caches with random content, and slots in random order."""
    blocks = tokens // block_size + 2
    shape = (blocks, block_size, kv_heads, head_dim)
    return draw.normal(*shape), draw.normal(*shape), draw.permutation(blocks * block_size)[:tokens]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_store(fractal: hal.Backend, seed: int, dtype: torch.dtype) -> None:
    draw = Draw(dtype, "npu", seed)
    for tokens, kv_heads, head_dim in ((0, 2, 64), (1, 1, 16), (13, 2, 128), (150, 3, 80), (9, 8, 64)):
        packed = draw.normal(tokens, 3 * kv_heads * head_dim)  # the projection that contains both
        key, value = (part.view(tokens, kv_heads, head_dim) for part in packed.chunk(3, dim=-1)[1:])
        check(fractal, "store_kv_cache", dtype, (key, value, *written(draw, tokens, kv_heads, head_dim, 128)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3), ids="seed={}".format)
def test_split_norm_rope_and_store(fractal: hal.Backend, seed: int, dtype: torch.dtype) -> None:
    operation = ops.operation("split_qkv_rmsnorm_rope_cache")
    for sample in samples_of_128(Draw(dtype, "npu", seed)):
        check(fractal, operation.name, dtype, sample)
    draw = Draw(dtype, "npu", seed)
    head_dim = 128
    for tokens, heads, kv_heads in ((0, 4, 2), (140, 6, 3), (9, 16, 2), (7, 1, 1)):  # of more tokens than blocks
        angles = draw.normal(tokens, head_dim // 2).float().repeat(1, 2)
        sample = (
            draw.normal(tokens, (heads + 2 * kv_heads) * head_dim),
            draw.normal(head_dim),
            draw.normal(head_dim),
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            1e-5,
            heads,
            kv_heads,
            *written(draw, tokens, kv_heads, head_dim, 128),
        )
        # The kernel rounds less often than declared, and the reference's own rounding is, rarely, beyond the tolerance.
        check(fractal, operation.name, dtype, sample, rounded_once=True)


@thorough(EXHAUSTIVE, r"\[seed=1(0[4-9]|[12]\d)-")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(100, 124), ids="seed={}".format)
def test_attention(fractal: hal.Backend, seed: int, dtype: torch.dtype) -> None:
    check(fractal, "paged_attention", dtype, drawn_attention(seed, dtype, head_dim=128))


def test_a_softcap_is_refused(fractal: hal.Backend) -> None:
    sample = drawn_attention(0, torch.float16, head_dim=128, softcap=30.0)
    with pytest.raises(OperationError, match=r"softcap=30.0.* FRACTAL_NZ supports only .*\n.*nz_cache"):
        fractal.ops.paged_attention(*sample)


def test_blocks_that_prefill_does_not_take(fractal: hal.Backend) -> None:
    """There is no fallback to the reference, because it reads the canonical layout."""
    sample = attention_arguments(Draw(torch.float16, "npu"), [5], [5], head_dim=64, block_size=16)
    with pytest.raises(OperationError, match="FRACTAL_NZ has blocks of 16 tokens"):
        fractal.ops.paged_attention(*sample)


def test_a_cache_of_the_backend_is_such(fractal: hal.Backend) -> None:
    """Attention reads what is stored in it."""
    states = fractal.allocate(StateSpec.key_value(2, 2, 48, torch.float16, num_blocks=3, block_size=128))
    assert len(states.layers) == 2
    assert not any(bool(each.any()) for _, each in states.tensors())
    draw, (keys, values) = Draw(torch.float16, "npu"), states.layers[1].values()
    key, value = draw.normal(9, 2, 48), draw.normal(9, 2, 48)
    slots = torch.arange(128, 137, dtype=torch.int32, device="npu")
    with torch.inference_mode():
        fractal.ops.store_kv_cache(key, value, keys, values, slots)
    assert torch.equal(from_tiles(keys)[1, :9], key)
    assert torch.equal(from_tiles(values)[1, :9], value)
    assert not states.layers[0]["key"].any()


def test_a_model_with_another_head_dimension_is_refused(npu: Opened, tmp_path: Path) -> None:
    backend = npu(dtype="float16", options={"nz_cache": True})
    with pytest.raises(ConfigError, match="no attention kernel for head_dim 64") as caught:
        hal.Runner(hal.load_model(random_checkpoint(tmp_path / "qwen3", head_dim=64), backend), backend)
    assert "it supports 128" in caught.value.remedy


def test_launches(fractal: hal.Backend) -> None:
    """Two launches instead of six: the kernel, and a cast of the slots to int64."""
    draw = Draw(torch.float16, "npu")
    sample = samples_of_128(draw)[0]
    torch.npu.synchronize()
    with emulated_cann.trace() as trace:
        fractal.ops.split_qkv_rmsnorm_rope_cache(*sample)
    assert trace.counts() == {"QkvRmsNormRopeCache": 1, "InplaceCopy": 1}
