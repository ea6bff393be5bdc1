"""Tests that compile the Triton kernels of attention, of single rows and of the cache for GPUs that are not present.

Run by test_triton_kernels.py in a subprocess.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from helpers.triton_checking import EXPERTS, RECURRENT
from helpers.triton_compiling import Compiling, check_fits, check_product, compiled, empty

from hal.bench.plan import SHAPES
from hal.ops import AttentionOptions, HyperConnectionOptions

pytest_plugins = ("helpers.triton_compiling",)

TOKENS, SEQUENCES = 48, 3


def attend(
    tokens: int, sequences: int, head_dim: int, dtype: torch.dtype, *, with_sinks: bool = False, **options: Any
) -> None:
    integers = [torch.zeros(count, dtype=torch.int32) for count in (sequences + 1, sequences)]
    cache = empty(2, 64, 8, head_dim, dtype=dtype)
    table = torch.zeros(sequences, 128, dtype=torch.int32)
    query = empty(tokens, 32, head_dim, dtype=dtype)
    sinks = empty(32, dtype=dtype) if with_sinks else None
    KERNELS["paged_attention"](
        query, cache, cache, table, *integers, *integers, sinks, AttentionOptions(0.1, **options)
    )


def rows() -> dict[str, tuple[Any, ...]]:
    """Arguments of the size that Qwen3-8B has, and four streams, of every kernel of single rows and of the cache."""
    config = SHAPES["qwen3-8b"]
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    x, weight, merged = empty(TOKENS, hidden), empty(hidden), empty(TOKENS, 2 * inner)
    scale, offset = torch.ones(1), torch.ones(1, dtype=torch.int32)
    qkv, norm, angles = empty(TOKENS, (heads + 2 * kv_heads) * head_dim), empty(head_dim), empty(TOKENS, head_dim)
    query, key, value = qkv.unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), 1)
    cache, slots = empty(2, 64, kv_heads, head_dim), torch.zeros(TOKENS, dtype=torch.int32)
    split = qkv, norm, norm, angles, angles, 1e-6, heads, kv_heads
    streams, options = empty(TOKENS, 4, hidden), HyperConnectionOptions(1e-6, 1e-6, 20)
    projection = torch.zeros(options.rows(4), 4 * hidden)
    return {
        "add_rms_norm": (x, x, weight, 1e-6),
        "add_rms_norm_dynamic_quantize": (x, x, weight, 1e-6),
        "add_rms_norm_quantize": (x, x, weight, 1e-6, scale, offset),
        "clipped_silu_and_mul": (merged, 1.702, 7.0, False),
        "collapse_streams": (streams, projection, projection[:, 0], torch.ones(3), options),
        "dynamic_quantize": (x,),
        "expand_streams": (streams, x, torch.zeros(TOKENS, 4), torch.zeros(TOKENS, 4, 4)),
        "gelu_and_mul": (merged, "tanh"),
        "quantize": (x, scale, offset),
        "rms_norm": (query, norm, 1e-6),
        "rotary_embedding": (query, key, angles, angles),
        "silu_and_mul": (merged,),
        "silu_and_mul_dynamic_quantize": (merged,),
        "silu_and_mul_quantize": (merged, scale, offset),
        "split_qkv_rmsnorm_rope": split,
        "split_qkv_rmsnorm_rope_cache": (*split, cache, cache, slots),
        "store_kv_cache": (key, value, cache, cache, slots),
    }


def test_rows_fit_and_move_16_bytes_at_once(compiling: Compiling) -> None:
    arguments = rows()
    assert arguments.keys() | EXPERTS | RECURRENT | {"linear", "paged_attention"} == KERNELS.keys()
    for name, sample in arguments.items():
        (kernel,) = compiled(compiling, name, *sample)
        check_fits(kernel)
        assert re.search(r"ld\.global[.\w:]*\.v4\.b32", kernel.ptx), f"{name} loads less than 16 bytes at a time"
        assert re.search(r"st\.global[.\w:]*\.v4\.b32|st\.global[.\w:]*\.v2\.b32", kernel.ptx), name


def test_variants_of_rows_fit(compiling: Compiling) -> None:
    """Parts of heads, adjacent pairs, other activations, and norms with float32 weights."""
    arguments, before = rows(), len(compiling.compiled)
    query, key, angles, _ = arguments["rotary_embedding"]
    part = angles[:, : angles.shape[1] // 4]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("rotary_embedding", (query, key, part, part)),
        ("rotary_embedding", (query, key, part, part, True)),
        ("rotary_embedding", (query, key, angles, angles, True)),
        ("gelu_and_mul", (*arguments["gelu_and_mul"][:1], "none")),
        ("clipped_silu_and_mul", (*arguments["clipped_silu_and_mul"][:3], True)),
    ]
    for name in ("rms_norm", "add_rms_norm"):
        *others, weight, eps = arguments[name]
        calls.append((name, (*others, weight.float(), eps)))
    qkv, q_weight, k_weight, *others = arguments["split_qkv_rmsnorm_rope"]
    calls.append(("split_qkv_rmsnorm_rope", (qkv, q_weight.float(), k_weight.float(), *others)))
    for name, given in calls:
        KERNELS[name](*given)
    kernels = compiling.compiled[before:]
    assert len(kernels) == len(calls)
    assert [kernel.name for kernel in kernels if kernel.spilled] == []


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)])
def test_attention_fits(head_dim: int, dtype: torch.dtype, compiling: Compiling) -> None:
    before = len(compiling.compiled)
    for tokens in (SEQUENCES, 16, 4096):  # decode, and prefills of few and of many tokens
        attend(tokens, SEQUENCES, head_dim, dtype)
        if head_dim < 256:
            attend(tokens, SEQUENCES, head_dim, dtype, with_sinks=True, softcap=50.0)
    kernels = compiling.compiled[before:]
    assert {kernel.name for kernel in kernels} == {"_attend", "_combine"}
    for kernel in kernels:
        (check_product if kernel.name == "_attend" else check_fits)(kernel)


@pytest.mark.parametrize(("head_dim", "dtype"), [(80, torch.bfloat16), (128, torch.float32), (256, torch.float32)])
def test_attention_that_may_spill_a_little(head_dim: int, dtype: torch.dtype, driver: Compiling) -> None:
    driver.capability, before = 80, len(driver.compiled)
    attend(SEQUENCES, SEQUENCES, head_dim, dtype)
    attend(4096, SEQUENCES, head_dim, dtype, window=512)
    attend(4096, SEQUENCES, head_dim, dtype, with_sinks=True, softcap=50.0)
    assert len(driver.compiled) == before + 4
    for kernel in driver.compiled[before:]:
        check_fits(kernel, 128)


def test_consumer_gpus_have_the_shared_memory(driver: Compiling) -> None:
    """Consumer GPUs have the least shared memory; Triton refuses kernels that do not fit."""
    driver.capability, before = 86, len(driver.compiled)
    for head_dim in (128, 256):
        attend(SEQUENCES, SEQUENCES, head_dim, torch.bfloat16)
        attend(4096, SEQUENCES, head_dim, torch.bfloat16)
    assert len(driver.compiled) == before + 6


def test_one_compilation_serves_all_batches(driver: Compiling) -> None:
    """One compilation serves sizes divisible by 16, others, and 1.

    A step must not wait for a compiler because its batch size is new.
    """
    driver.capability, before = 90, len(driver.compiled)
    for sequences in (1, 2, 16, 33):
        attend(sequences, sequences, 96, torch.bfloat16)
        KERNELS["rms_norm"](empty(sequences, 1536), empty(1536), 1e-6)
        KERNELS["silu_and_mul"](empty(sequences, 1536))
    names = [kernel.name for kernel in driver.compiled[before:]]
    assert names.count("_norm") == names.count("_gated") == 1
    assert names.count("_attend") <= 2  # with and without a split
