"""Tests that fused operations refuse, with a reason, what the hardware refuses and what is not emulated.

Each case changes one thing in a valid call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from support.ones import bf16, f32, half, i8, i32, i64
from support.refusals import Row, check_fails, check_refused, check_works
from torch import Tensor


def attention_of(arguments: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
    shared = {"num_heads": 4, "num_key_value_heads": 2, "scale": 1.0}
    return lambda **changes: torch_npu.npu_fused_infer_attention_score(**{**shared, **arguments(), **changes})


def packed_tensors() -> dict[str, Any]:
    return qkv(bf16(5, 4, 64), bf16(9, 2, 64), input_layout="TND")


def cached(cache: Tensor, **more: Any) -> dict[str, Any]:
    return {"key": cache, "value": cache, **more}


def qkv(query: Tensor, key: Tensor, **more: Any) -> dict[str, Any]:
    return {"query": query, **cached(key), **more}


def at(block_size: int, table: Tensor, lengths: list[int]) -> dict[str, Any]:
    return {"block_table": table, "block_size": block_size, "actual_seq_lengths_kv": lengths}


# Paged, with two sequences of one query each, and of four.
attend = attention_of(lambda: qkv(half(2, 1, 256), half(8, 16, 128), input_layout="BSH", **at(16, i32(2, 4), [3, 20])))
attend_blocks = attention_of(
    lambda: qkv(half(2, 4, 256), half(3, 128, 128), input_layout="BSH", **at(128, i32(2, 2), [129, 5]))
)
# Unpaged, with two sequences of four queries each, and packed ones of two and three.
prefill = attention_of(lambda: qkv(half(2, 4, 4, 64), half(2, 2, 9, 64), input_layout="BNSD"))
packed = attention_of(lambda: {**packed_tensors(), "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [4, 9]})


def with_sinks(**changes: Any) -> Any:
    """Run an unpaged TND call with sinks, with sequences of two and three queries."""
    arguments = {"num_query_heads": 4, "num_key_value_heads": 2, "actual_seq_qlen": [2, 5], "actual_seq_kvlen": [4, 9]}
    arguments |= {**packed_tensors(), "learnable_sink": bf16(4)}
    return torch_npu.npu_fused_infer_attention_score_v2(**{**arguments, **changes})


def paged(blocks: int, block_size: int, width: int = 128, of: Callable[..., Tensor] = bf16) -> dict[str, Any]:
    """Return ``packed`` with a paged cache."""
    cache = of(blocks, block_size, width)
    return cached(cache, **at(block_size, i32(2, 1), [4, 5]))


def int8_cache(block_size: int, **changes: Any) -> dict[str, Any]:
    """Return ``attend`` with an int8 cache, and a scale of each token and head."""
    numbers, names = i8(8, block_size, 128), ("key_antiquant", "value_antiquant")
    scales = dict.fromkeys((f"{name}_scale" for name in names), f32(8, 2, block_size))
    modes = dict.fromkeys((f"{name}_mode" for name in names), 5)
    return cached(numbers, block_size=block_size) | scales | modes | changes


def mask(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device="npu")


def attention() -> Iterator[Row]:
    packed_shapes = (("query", 5, 4), ("key", 9, 2), ("value", 9, 2))
    yield from (
        (attend, cached(bf16(8, 16, 128)), "must have the query's dtype"),
        (attend, cached(i8(8, 16, 128)), "must have the query's dtype"),
        (attend, {"query": f32(2, 1, 256)}, "query must be float16 or bfloat16"),
        (attend, {"query": half(2, 1, 512)[..., :256]}, "query must be contiguous"),
        (attend, {"key": half(8, 16, 256)[..., :128]}, "key and value must be contiguous"),
        (attend, {"actual_seq_lengths_kv": None}, "a paged cache requires actual_seq_lengths_kv"),
        (attend, {"actual_seq_lengths_kv": [3, 65]}, r"actual_seq_lengths_kv\[1\] is 65, but must be between 0 and 64"),
        (attend, {"actual_seq_lengths_kv": [3, -1]}, "is -1"),
        (attend, {"block_table": i64(2, 4)}, "block_table must be int32"),
        (attend, {"block_table": i32(3, 4)}, "block_table must be contiguous and"),
        (attend, {"block_table": i32(2, 8)[:, ::2]}, "block_table must be contiguous and"),
        (attend, {"block_size": 32}, "block_size must be that of the cache, 16, but is 32"),
        (attend, cached(half(8, 24, 128), block_size=24), "multiple of 16 and at most 512"),
        (attend, cached(half(2, 528, 128), block_size=528), "multiple of 16 and at most 512"),
        (attend, {"query": half(2, 4, 256)}, "block_size must be 128, 256, 384 or 512"),
        (attend, cached(half(8, 2, 16, 64)), "with a query in BSH, a paged cache must"),
        (attend, cached(half(8, 2, 8, 16, 8)), "in FRACTAL_NZ must be 16, but is 8"),
        (attend, {"num_heads": 4, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        (attend, {"input_layout": "BSH_SBH"}, "layout"),
        (prefill, qkv(half(2, 4, 4, 40), half(2, 2, 9, 40)), "multiple of 16 and at most 512"),
        (prefill, qkv(half(2, 4, 4, 528), half(2, 2, 9, 528)), "multiple of 16 and at most 512"),
        (with_sinks, {"learnable_sink": half(4)}, "learnable_sink must be bfloat16"),
        (with_sinks, {"learnable_sink": bf16(2)}, r"must have shape \[num_heads\], not \[2\]"),
        (
            with_sinks,
            qkv(bf16(2, 4, 4, 64), bf16(2, 2, 9, 64), input_layout="BNSD", actual_seq_qlen=None, actual_seq_kvlen=None),
            "learnable_sink requires input_layout TND or NTD_TND, not BNSD",
        ),
        (
            with_sinks,
            qkv(bf16(5, 2, 192), bf16(9, 2, 192), num_query_heads=2, learnable_sink=bf16(2)),
            "learnable_sink requires the head dimension 64 or 128, but it is 192",
        ),
        (with_sinks, {"pse_shift": bf16(1, 4, 3, 5)}, "learnable_sink does not support pse_shift"),
        (prefill, {"num_heads": 8}, "num_heads must be that of the query, 4, but is 8"),
        (
            prefill,
            qkv(half(1, 130, 1, 16), half(1, 2, 9, 16), num_heads=130),
            "at most 64 for head dimension 16 in this release of CANN, but is 65",
        ),
        (
            prefill,
            qkv(half(1, 257, 1, 16), half(1, 257, 9, 16), num_heads=257, num_key_value_heads=257),
            "between 1 and 256",
        ),
        (prefill, {"actual_seq_lengths": [5, 4]}, r"actual_seq_lengths\[0\] is 5"),
        (prefill, {"actual_seq_lengths_kv": [1, 2, 10][::-1]}, "is 10"),
        (prefill, {"sparse_mode": 5}, "sparse_mode must be 0, 1, 2, 3 or 4"),
        (prefill, {"sparse_mode": 1}, "sparse_mode 1 requires atten_mask"),
        (prefill, {"sparse_mode": 3}, "sparse_mode 3 requires atten_mask"),
        (prefill, {"sparse_mode": 3, "atten_mask": mask(4, 9)}, r"must have shape \[2048, 2048\]"),
        (prefill, {"sparse_mode": 2, "atten_mask": mask(2, 2048, 2048)}, r"must have shape \[2048, 2048\]"),
        (prefill, {"atten_mask": mask(2, 1, 4, 8)}, "must cover 4 queries and 9 keys"),
        (prefill, {"atten_mask": mask(2, 1, 3, 9)}, "must cover 4 queries and 9 keys"),
        (prefill, {"atten_mask": mask(3, 4, 9)}, "must be 1 or the batch size, 2, but is 3"),
        (prefill, {"atten_mask": mask(2, 4, 4, 9)}, "must be 1, for all heads, but is 4"),
        (prefill, {"atten_mask": half(4, 9)}, "must be bool, int8 or uint8"),
        (prefill, {"atten_mask": mask(4, 18)[:, ::2]}, "atten_mask must be contiguous"),
        (prefill, {"quant_scale2": f32(1)}, "quantized output .* is not emulated"),
        (prefill, {"antiquant_scale": half(2)}, "quantized cache .* is not emulated"),
        (attend, int8_cache(16), "block_size of an int8 cache must be a multiple of 32, but is 16"),
        (attend, int8_cache(32, value_antiquant_scale=None), "must be given together"),
        (attend, int8_cache(32, key_antiquant_mode=4), "key_antiquant_mode than 5, .* is not emulated"),
        (attend, int8_cache(32, value_antiquant_mode=4), "must be equal"),
        (attend, int8_cache(32, key_antiquant_scale=f32(8, 32, 2)), r"must have shape \[8, 2, 32\], not \[8, 32, 2\]"),
        (attend, int8_cache(32, key_antiquant_scale=bf16(8, 2, 32)), "must be float32 and contiguous"),
        (attend, int8_cache(32, key=half(8, 32, 128)), "or int8 with key_antiquant_scale"),
        (prefill, {"kv_padding_size": i64(1)}, "left padding .* is not emulated"),
        (
            prefill,
            {"key_shared_prefix": half(1, 2, 9, 64), "value_shared_prefix": half(1, 2, 9, 64)},
            "shared prefix .* is not emulated",
        ),
        (packed, {"actual_seq_lengths": None}, "a TND layout requires actual_seq_lengths"),
        (packed, {"actual_seq_lengths_kv": None}, "a TND layout requires actual_seq_lengths_kv"),
        (packed, {"actual_seq_lengths": [3, 2]}, "must be cumulative, but 2 follows 3"),
        (packed, {"actual_seq_lengths": [2, 4]}, "must end with T = 5, but ends with 4"),
        (packed, {"actual_seq_lengths": [5]}, "must have the same number of entries, but have 1 and 2"),
        (packed, {"actual_seq_lengths": [0] * 4096 + [5]}, "must have at most 4096 entries, but has 4097"),
        (
            packed,
            {"atten_mask": mask(5, 9)},
            "atten_mask in a TND layout requires sparse_mode 2, 3 or 4, but sparse_mode is 0",
        ),
        (packed, paged(4, 24), "multiple of 16 and at most 1024"),
        (packed, paged(4, 128) | {"actual_seq_lengths_kv": [0, 0]}, "must not all be 0"),
        (packed, paged(1, 128), "at most the cache's 1 blocks, .* but need 2"),
        (attend_blocks, {"actual_seq_lengths_kv": [129, 130]}, "at most the cache's 3 blocks, .* but need 4"),
        (
            packed,
            {name: half(rows, heads, 272) for name, rows, heads in packed_shapes},
            "the head dimension in TND must be at most 256, but is 272",
        ),
        *(
            (
                packed,
                {name: half(rows, heads, 256) for name, rows, heads in packed_shapes} | change,
                "the head dimension in a TND layout must be 64 or 128",
            )
            for change in (
                {"inner_precise": 1},
                {"sparse_mode": 2, "atten_mask": mask(2048, 2048)},
                cached(half(4, 2, 128, 256), **at(128, i32(2, 1), [4, 5])),
                paged(4, 528, 512, half),
            )
        ),
        (
            packed,
            {name: half(heads, rows, 256) for name, rows, heads in packed_shapes} | {"input_layout": "NTD"},
            "the head dimension in a TND layout must be 64 or 128",
        ),
    )


def test_attention() -> None:
    check_works((attend, prefill, packed, with_sinks, attend_blocks))
    check_refused(attention())


def product(arguments: dict[str, Any]) -> Any:
    places = [arguments.pop(name) for name in ("x1", "x2", "scale")]
    return torch_npu.npu_quant_matmul(*places, **{"output_dtype": torch.float16, **arguments})


def quantized(**changes: Any) -> Any:
    return product({"x1": i8(4, 64), "x2": i8(64, 32), "scale": f32(32), "pertoken_scale": f32(4), **changes})


def mixed(**changes: Any) -> Any:
    """Run int8 activations with int4 weights, in groups of 256 rows."""
    arguments = {"x1": i8(4, 512), "x2": i32(512, 4), "scale": i64(2, 32), "pertoken_scale": f32(4, 1)}
    return product({**arguments, "offset": f32(32), "group_sizes": [0, 0, 256], **changes})


def weighted(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"x": half(4, 64), "weight": i8(64, 32), "antiquant_scale": half(32)}
    return torch_npu.npu_weight_quant_batchmatmul(**{**arguments, **changes})


def scattered(**changes: Any) -> Any:
    rows = {"key": half(4, 2, 64), "value": half(4, 2, 64), "slot_mapping": torch.arange(4, dtype=torch.int32).npu()}
    caches = {"key_cache": half(8, 16, 2, 64), "value_cache": half(8, 16, 2, 64), "cache_mode": "Norm"}
    return torch_npu.npu_scatter_pa_kv_cache(**{**rows, **caches, **changes})


def fused_cache(**changes: Any) -> Any:
    arguments = {"qkv": half(4, 1024), "q_gamma": half(128), "k_gamma": half(128), "cos": half(4, 128)}
    arguments |= {"sin": half(4, 128), "index": torch.arange(4).npu(), "q_out": half(4, 512)}
    caches = {"k_cache": half(8, 16, 16, 16), "v_cache": half(8, 16, 16, 16)}
    sizes = {"qkv_size": [4, 1, 8, 128], "head_nums": [4, 2, 2]}
    return torch_npu.npu_qkv_rms_norm_rope_cache(**{**arguments, **caches, **sizes, **changes})


def call(function: str, *arguments: Any, **keywords: Any) -> Callable[[], Any]:
    return lambda: getattr(torch_npu, f"npu_{function}")(*arguments, **keywords)


def changed(function: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    return lambda: function(**changes)


def others() -> Iterator[tuple[Callable[[], Any], str]]:
    x, gamma = half(4, 64), half(64)
    yield call("rms_norm", x, half(32)), "gamma must have the shape of x's last dimensions"
    yield call("rms_norm", x, bf16(64)), "gamma must have x's dtype"
    yield call("rms_norm", i32(4, 64), i32(64)), "float16, bfloat16 or float32"
    yield call("add_rms_norm", x, half(3, 64), gamma), "x1 and x2 must have the same shape and dtype"
    yield call("add_rms_norm", x, bf16(4, 64), gamma), "x1 and x2 must have the same shape and dtype"
    yield call("add_rms_norm", x, x, f32(64)), "gamma must have x1's dtype"
    yield call("add_rms_norm_cast", x.float(), x.float(), gamma.float()), "float16 or bfloat16"
    yield call("add_rms_norm_quant", x, x, gamma, half(64), None), "scales1 must be Float with Half input"
    yield call("add_rms_norm_quant", x, x, gamma, f32(1), None), "scales1 must have gamma's shape"
    yield call("add_rms_norm_quant", x, x, gamma, f32(64), half(64)), "zero_points must be Int with Float scales"
    wide = bf16(4, 64)
    refused = call("add_rms_norm_quant", wide, wide, bf16(64), bf16(64), i32(64))
    yield refused, "zero_points must be BFloat16 with BFloat16 scales"
    refused = call("add_rms_norm_dynamic_quant", x, x, gamma, smooth_scale1=half(32))
    yield refused, "smooth_scale1 must have gamma's shape"
    yield call("add_rms_norm_dynamic_quant", x, x, gamma, beta=f32(64)), "beta must have gamma's dtype"
    refused = call("add_rms_norm_dynamic_quant", x, x, gamma, smooth_scale1=gamma, output_mask=[False, True])
    yield refused, "output_mask must be True for each output with a smooth scale"
    yield call("rms_norm_quant", x, gamma, gamma, half(64), i8(64)), r"scale must have shape \[1\]"
    yield call("rms_norm_quant", x, gamma, gamma, half(1), i32(1)), r"offset must be int8 of shape \[1\]"
    yield call("quantize", x, f32(63), None, torch.qint8, -1), "1 element or as many as x has"
    yield call("quantize", x, f32(64), None, torch.qint8, -1, False), "scale must have x's dtype"
    yield call("quantize", x, bf16(64), None, torch.qint8, -1), "scales must be float32 or have x's dtype"
    yield call("quantize", x, f32(64), bf16(64), torch.qint8, -1), "scales and x must be bfloat16"
    yield call("quantize", x, f32(64), f32(64), torch.qint8, -1), "zero_points must be int32"
    yield call("dynamic_quant", x.float()), "x must be float16 or bfloat16"
    yield call("dynamic_quant", x, smooth_scales=f32(64)), "smooth_scales must have x's dtype"
    yield call("dynamic_quant", x, smooth_scales=half(2, 64), group_index=i64(2)), "group_index must be int32"
    yield call("rotary_mul", half(2, 3, 4, 63), half(2, 3, 1, 63), half(2, 3, 1, 63)), "even and below 896"
    yield call("rotary_mul", half(2, 3, 4, 896), half(2, 3, 1, 896), half(2, 3, 1, 896)), "even and below 896"
    yield call("rotary_mul", half(2, 3, 4, 64), half(2, 2, 1, 64), half(2, 2, 1, 64)), "must be 1 or the input's, 3"
    rotary = half(2, 3, 1, 64)
    refused = call("apply_rotary_pos_emb", half(2, 3, 4, 32), half(2, 3, 4, 32), half(2, 3, 1, 32), half(2, 3, 1, 32))
    yield refused, "must be 64 or 128"
    refused = call("apply_rotary_pos_emb", half(2, 3, 4, 64), half(2, 3, 4, 64), rotary, rotary, "BNSD")
    yield refused, r"layout must be 1 \(BSND\) or 4 \(TND\)"
    refused = call("apply_rotary_pos_emb", half(2, 3, 4, 64), half(2, 3, 4, 64), rotary, rotary, rotary_mode="quarter")
    yield refused, "rotary_mode must be 'half'"
    turned, wide_heads = bf16(2, 1, 128), [bf16(2, heads, 128) for heads in (69, 8)]
    refused = call("apply_rotary_pos_emb", *wide_heads, turned, turned, "TND")
    yield refused, "must fit into the unified buffer of 196608 bytes, but take 199168"
    refused = call("interleave_rope", half(2, 3, 4, 32), half(2, 1, 4, 32), half(2, 1, 4, 32))
    yield refused, "must have shape .B, N, S, 64."
    positions = torch.arange(4).npu()
    yield call("mrope", positions, half(4, 96), half(4, 96), half(9, 48), 48), "multiples of 32"
    rows = positions.expand(3, 4).contiguous()
    short = call("mrope", rows, half(4, 64), half(4, 64), half(9, 64), 64, mrope_section=[8, 8, 8])
    yield short, "the sum of mrope_section must be rotary_dim / 2, 32, but is 24"
    turned_by_rows = call("mrope", rows, half(4, 64), half(4, 64), half(9, 64), 64, mrope_section=[12, 10, 10])
    yield turned_by_rows, "mrope_section must be .16, 24, 24."
    one_row = call("mrope", positions, half(4, 64), half(4, 64), half(9, 64), 64, mrope_section=[8, 12, 12])
    yield one_row, "positions must have shape .3 or 4, tokens."
    yield call("swiglu", half(4, 63)), "must be even"
    yield call("swiglu_quant", half(4, 64), quant_mode=0), "static quantization requires smooth_scales and offsets"
    refused = call("swiglu_quant", half(4, 64), quant_mode=1, dst_type=torch.quint4x2)
    yield refused, "int4 output of SwiGluQuantV2 is not emulated"
    yield call("dequant_swiglu_quant", i32(4, 128), quant_mode=1), "int32 x requires weight_scale"
    yield call("dequant_swiglu_quant", half(4, 128), quant_mode=0), "static quantization requires quant_scale"
    static = {"quant_mode": 0, "quant_scale": f32(1)}
    yield call("dequant_swiglu_quant", half(4, 128), **static), "without group_index requires quant_offset"
    yield call("dequant_swiglu_quant", half(4, 128), **static, quant_offset=i32(1)), "quant_offset must be float32"
    refused = call("dequant_swiglu_quant", half(4, 128), **static, quant_offset=f32(64))
    yield refused, "quant_offset must have as many elements as quant_scale, 1, but has 64"
    refused = call("dequant_swiglu_quant", half(4, 128), quant_mode=1, quant_scale=f32(2))
    yield refused, "quant_scale must have 1 element or H = 64"
    yield call("dequant_swiglu_quant", half(4, 9832), quant_mode=1), "must take less than 196608 bytes together"
    refused = call("dequant_swiglu_quant", half(4, 100), quant_mode=1, group_index=i64(1))
    yield refused, "H must be a multiple of 64 and at most 10496, but is 50"
    yield changed(quantized, x1=i8(4, 65)), "x1 must have as many columns as x2 has rows, 64, but has 65"
    wide_factors = {"x1": i8(4, 65536), "x2": i8(65536, 32)}
    refused = changed(quantized, **wide_factors, pertoken_scale=None, output_dtype=torch.bfloat16)
    yield refused, "at most 65535, but are 65536"
    yield changed(quantized, scale=f32(31)), "scale must have 1 element or N = 32, not 31"
    yield changed(quantized, pertoken_scale=f32(5)), r"pertoken_scale must be float32 of shape \[M\]"
    yield changed(quantized, scale=bf16(32)), "requires a float32 scale"
    yield changed(quantized, scale=i64(32), output_dtype=torch.bfloat16), "requires a float32 or bfloat16 scale"
    yield changed(quantized, pertoken_scale=None, bias=half(32)), "bias must be int32 with a Half output"
    yield changed(quantized, bias=bf16(32)), "bias must be int32, float32 or have the output's dtype"
    yield changed(quantized, offset=f32(32)), "requires an int8 output"
    yield changed(quantized, group_sizes=[0, 0, 256]), "group_sizes without int8 x1 and int4 x2 is not emulated"
    yield changed(mixed, x1=i8(4, 510)), "x1 must have as many columns as x2 has rows, 512, but has 510"
    odd = {"x1": i8(4, 511), "x2": i32(511, 4)}
    yield changed(mixed, **odd), "a multiple of 256, but is 511"
    wide = {"x1": i8(4, 29952), "x2": i32(29952, 4), "scale": i64(117, 32)}
    yield changed(mixed, **wide), "K must be at most 29576"
    yield changed(mixed, group_sizes=None), "group_sizes must be .0, 0, 256. with a scale of 2 dimensions"
    yield changed(mixed, scale=i64(32)), "and omitted with a scale of 1 dimension"
    yield changed(mixed, scale=f32(2, 32)), "scale must be the int64 output of TransQuantParam"
    yield changed(mixed, scale=i64(3, 32)), "for groups of 256 rows, with K = 512 and N = 32"
    yield changed(mixed, pertoken_scale=f32(4)), "pertoken_scale must be float32 of shape .M., or .M, 1."
    yield changed(mixed, offset=None), "offset must be float32 of shape .N."
    yield changed(mixed, bias=i32(32)), "bias must be omitted with int8 x1 and int4 x2"
    yield changed(mixed, output_dtype=torch.int8), "out must be float16 or bfloat16"
    yield changed(weighted, weight=half(64, 32)), "weight must be int8, or int4 in int32"
    yield changed(weighted, antiquant_scale=half(31)), "antiquant_scale must have 1 or 32 elements, but has 31"
    yield changed(weighted, antiquant_scale=bf16(32)), "antiquant_scale must have x's dtype"
    batches = half(2, 4, 8), half(2, 8, 5)
    refused = call("transpose_batchmatmul", *batches, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[0, 1, 2])
    yield refused, "perm_y must be"
    refused = call("transpose_batchmatmul", *batches, perm_x1=[0, 2, 1], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    yield refused, "perm_x1 must be"
    yield call("scatter_nd_update_", half(4, 8), half(2, 1), half(2, 8)), "indices must be int32 or int64"
    yield call("scatter_nd_update_", half(4, 8), i32(2, 1), half(2, 7)), "must have the shape that indices select"
    yield call("scatter_nd_update_", half(4, 8), i32(2, 3), half(2)), "last dimension of indices must be between 1"
    yield changed(scattered, cache_mode="ND"), "cache_mode must be Norm or PA_NZ"
    yield changed(scattered, cache_mode="PA_NZ"), "with cache_mode PA_NZ, key_cache must have shape"
    yield changed(scattered, key_cache=bf16(8, 16, 2, 64)), "key_cache must have the dtype of key"
    yield changed(scattered, slot_mapping=half(4)), "slots must be int32 or int64"
    yield changed(scattered, slot_mapping=i32(5)), r"slots must have shape \[4\], one slot for each token"
    yield changed(scattered, seq_lens=i32(4)), "compressed caches .* are not emulated"
    yield changed(fused_cache, cache_mode="PA"), "cache_mode must be PA_NZ"
    yield changed(fused_cache, head_nums=[5, 2, 2]), "qkv_size and head_nums must agree with qkv"
    yield changed(fused_cache, qkv_size=[4, 1, 16, 64], head_nums=[8, 4, 4]), "D must be 128, but is 64"
    few = half(3, 16, 16, 16)
    yield changed(fused_cache, k_cache=few, v_cache=few), r"at least ceil\(S / block_size\) \* B = 4 blocks, but have 3"
    yield changed(fused_cache, index=torch.arange(4, dtype=torch.int32).npu()), "index must be int64"
    yield changed(fused_cache, k_cache=half(8, 8, 16, 32)), "k_cache and v_cache must have shape .blocks, Nk"
    yield changed(fused_cache, k_scale=f32(2, 128)), "a quantized cache is not emulated"
    yield call("top_k_top_p", f32(2, 9), half(2), i32(2)), "and the logits' dtype"
    yield call("top_k_top_p", half(2, 9), half(2), i64(2)), r"k must be int32 of shape \[batch\]"


def test_operations() -> None:
    check_works((quantized, mixed, weighted, scattered, fused_cache))
    check_refused((call, {}, reason) for call, reason in others())


def at_run_time() -> Iterator[tuple[Callable[[], Any], str]]:
    """Yield calls that are refused only because of a tensor's content, and the reasons."""
    refused = changed(scattered, slot_mapping=torch.tensor([0, 1, 2, 128], dtype=torch.int32).npu())
    yield refused, "slots must be less than the cache's capacity, 128, but one is 128"
    refused = changed(attend, block_table=i32(2, 4) * 8)
    yield refused, "the block numbers in block_table must be between 0 and 7, but one is 8"
    refused = changed(prefill, sparse_mode=3, atten_mask=mask(2048, 2048))
    yield refused, "must be True above the diagonal and False elsewhere"
    refused = call("scatter_nd_update_", half(4, 8), i32(2, 1) * 4, half(2, 8))
    yield refused, "indices must be between 0 and 3 in dimension 0"


def test_contents(capfd: pytest.CaptureFixture[str]) -> None:
    check_fails(((call, {}, reason) for call, reason in at_run_time()), capfd)
