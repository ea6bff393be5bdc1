"""Tests that fused operations refuse, with a reason, what the hardware refuses and what is not emulated.

Each case changes one thing in a valid call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

HALF, BF16, FLOAT, INT8, INT32, INT64 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.int32,
    torch.int64,
)


def t(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def attend(**changes: Any) -> Any:
    """Run a paged call with two sequences of one query each."""
    arguments: dict[str, Any] = {
        "query": t(2, 1, 256),
        "key": t(8, 16, 128),
        "value": t(8, 16, 128),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 1.0,
        "input_layout": "BSH",
        "block_table": t(2, 4, dtype=INT32),
        "block_size": 16,
        "actual_seq_lengths_kv": [3, 20],
    }
    return torch_npu.npu_fused_infer_attention_score(**{**arguments, **changes})


def attend_prefill(**changes: Any) -> Any:
    """Run an unpaged BNSD call with two sequences of four queries each."""
    arguments: dict[str, Any] = {
        "query": t(2, 4, 4, 64),
        "key": t(2, 2, 9, 64),
        "value": t(2, 2, 9, 64),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 1.0,
        "input_layout": "BNSD",
    }
    return torch_npu.npu_fused_infer_attention_score(**{**arguments, **changes})


def attend_packed(**changes: Any) -> Any:
    """Run an unpaged TND call with sequences of two and three queries."""
    arguments: dict[str, Any] = {
        "query": t(5, 4, 64, dtype=BF16),
        "key": t(9, 2, 64, dtype=BF16),
        "value": t(9, 2, 64, dtype=BF16),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 1.0,
        "input_layout": "TND",
        "actual_seq_lengths": [2, 5],
        "actual_seq_lengths_kv": [4, 9],
    }
    return torch_npu.npu_fused_infer_attention_score(**{**arguments, **changes})


def attend_with_sinks(**changes: Any) -> Any:
    """Run an unpaged TND call with sinks, with sequences of two and three queries."""
    arguments: dict[str, Any] = {
        "query": t(5, 4, 64, dtype=BF16),
        "key": t(9, 2, 64, dtype=BF16),
        "value": t(9, 2, 64, dtype=BF16),
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_qlen": [2, 5],
        "actual_seq_kvlen": [4, 9],
        "learnable_sink": t(4, dtype=BF16),
    }
    return torch_npu.npu_fused_infer_attention_score_v2(**{**arguments, **changes})


def attend_blocks(**changes: Any) -> Any:
    """Run a paged BSH call with two sequences of four queries each."""
    arguments: dict[str, Any] = {
        "query": t(2, 4, 256),
        "key": t(3, 128, 128),
        "value": t(3, 128, 128),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 1.0,
        "input_layout": "BSH",
        "block_table": t(2, 2, dtype=INT32),
        "block_size": 128,
        "actual_seq_lengths_kv": [129, 5],
    }
    return torch_npu.npu_fused_infer_attention_score(**{**arguments, **changes})


def paged(blocks: int, block_size: int, width: int = 128, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Return ``attend_packed`` with a paged cache."""
    cache = t(blocks, block_size, width, dtype=dtype)
    return {
        "key": cache,
        "value": cache,
        "block_table": t(2, 1, dtype=INT32),
        "block_size": block_size,
        "actual_seq_lengths_kv": [4, 5],
    }


def int8_cache(block_size: int) -> dict[str, Any]:
    """Return ``attend`` with an int8 cache, and a scale of each token and head."""
    numbers, scale = t(8, block_size, 128, dtype=INT8), t(8, 2, block_size, dtype=FLOAT)
    return {
        "key": numbers,
        "value": numbers,
        "block_size": block_size,
        "key_antiquant_scale": scale,
        "value_antiquant_scale": scale,
        "key_antiquant_mode": 5,
        "value_antiquant_mode": 5,
    }


def mask(*shape: int) -> Tensor:
    return t(*shape, dtype=torch.bool)


def attention() -> list[tuple[Callable[..., Any], dict[str, Any], str]]:
    """Return calls, changes to them, and reasons.

    The arguments are made for each test, so that no tensor outlives it.
    """
    packed_shapes = (("query", 5, 4), ("key", 9, 2), ("value", 9, 2))
    return [
        (attend, {"key": t(8, 16, 128, dtype=BF16), "value": t(8, 16, 128, dtype=BF16)}, "must have the query's dtype"),
        (attend, {"key": t(8, 16, 128, dtype=INT8), "value": t(8, 16, 128, dtype=INT8)}, "must have the query's dtype"),
        (attend, {"query": t(2, 1, 256, dtype=FLOAT)}, "query must be float16 or bfloat16"),
        (attend, {"query": t(2, 1, 512)[..., :256]}, "query must be contiguous"),
        (attend, {"key": t(8, 16, 256)[..., :128]}, "key and value must be contiguous"),
        (attend, {"actual_seq_lengths_kv": None}, "a paged cache requires actual_seq_lengths_kv"),
        (attend, {"actual_seq_lengths_kv": [3, 65]}, r"actual_seq_lengths_kv\[1\] is 65, but must be between 0 and 64"),
        (attend, {"actual_seq_lengths_kv": [3, -1]}, "is -1"),
        (attend, {"block_table": t(2, 4, dtype=INT64)}, "block_table must be int32"),
        (attend, {"block_table": t(3, 4, dtype=INT32)}, "block_table must be contiguous and"),
        (attend, {"block_table": t(2, 8, dtype=INT32)[:, ::2]}, "block_table must be contiguous and"),
        (attend, {"block_size": 32}, "block_size must be that of the cache, 16, but is 32"),
        (attend, {"key": t(8, 24, 128), "value": t(8, 24, 128), "block_size": 24}, "multiple of 16 and at most 512"),
        (attend, {"key": t(2, 528, 128), "value": t(2, 528, 128), "block_size": 528}, "multiple of 16 and at most 512"),
        (attend, {"query": t(2, 4, 256)}, "block_size must be 128, 256, 384 or 512"),
        (attend, {"key": t(8, 2, 16, 64), "value": t(8, 2, 16, 64)}, "with a query in BSH, a paged cache must"),
        (attend, {"key": t(8, 2, 8, 16, 8), "value": t(8, 2, 8, 16, 8)}, "in FRACTAL_NZ must be 16, but is 8"),
        (attend, {"num_heads": 4, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        (attend, {"input_layout": "BSH_SBH"}, "layout"),
        (
            attend_prefill,
            {"query": t(2, 4, 4, 40), "key": t(2, 2, 9, 40), "value": t(2, 2, 9, 40)},
            "multiple of 16 and at most 512",
        ),
        (
            attend_prefill,
            {"query": t(2, 4, 4, 528), "key": t(2, 2, 9, 528), "value": t(2, 2, 9, 528)},
            "multiple of 16 and at most 512",
        ),
        (attend_with_sinks, {"learnable_sink": t(4)}, "learnable_sink must be bfloat16"),
        (attend_with_sinks, {"learnable_sink": t(2, dtype=BF16)}, r"must have shape \[num_heads\], not \[2\]"),
        (
            attend_with_sinks,
            {
                "query": t(2, 4, 4, 64, dtype=BF16),
                "key": t(2, 2, 9, 64, dtype=BF16),
                "value": t(2, 2, 9, 64, dtype=BF16),
                "input_layout": "BNSD",
                "actual_seq_qlen": None,
                "actual_seq_kvlen": None,
            },
            "learnable_sink requires input_layout TND or NTD_TND, not BNSD",
        ),
        (
            attend_with_sinks,
            {
                "query": t(5, 2, 192, dtype=BF16),
                "key": t(9, 2, 192, dtype=BF16),
                "value": t(9, 2, 192, dtype=BF16),
                "num_query_heads": 2,
                "learnable_sink": t(2, dtype=BF16),
            },
            "learnable_sink requires the head dimension 64 or 128, but it is 192",
        ),
        (
            attend_with_sinks,
            {"pse_shift": t(1, 4, 3, 5, dtype=BF16)},
            "learnable_sink does not support pse_shift",
        ),
        (attend_prefill, {"num_heads": 8}, "num_heads must be that of the query, 4, but is 8"),
        (
            attend_prefill,
            {"query": t(1, 130, 1, 16), "key": t(1, 2, 9, 16), "value": t(1, 2, 9, 16), "num_heads": 130},
            "at most 64 for head dimension 16 in this release of CANN, but is 65",
        ),
        (
            attend_prefill,
            {
                "query": t(1, 257, 1, 16),
                "key": t(1, 257, 9, 16),
                "value": t(1, 257, 9, 16),
                "num_heads": 257,
                "num_key_value_heads": 257,
            },
            "between 1 and 256",
        ),
        (attend_prefill, {"actual_seq_lengths": [5, 4]}, r"actual_seq_lengths\[0\] is 5"),
        (attend_prefill, {"actual_seq_lengths_kv": [1, 2, 10][::-1]}, "is 10"),
        (attend_prefill, {"sparse_mode": 5}, "sparse_mode must be 0, 1, 2, 3 or 4"),
        (attend_prefill, {"sparse_mode": 1}, "sparse_mode 1 requires atten_mask"),
        (attend_prefill, {"sparse_mode": 3}, "sparse_mode 3 requires atten_mask"),
        (attend_prefill, {"sparse_mode": 3, "atten_mask": mask(4, 9)}, r"must have shape \[2048, 2048\]"),
        (attend_prefill, {"sparse_mode": 2, "atten_mask": mask(2, 2048, 2048)}, r"must have shape \[2048, 2048\]"),
        (attend_prefill, {"atten_mask": mask(2, 1, 4, 8)}, "must cover 4 queries and 9 keys"),
        (attend_prefill, {"atten_mask": mask(2, 1, 3, 9)}, "must cover 4 queries and 9 keys"),
        (attend_prefill, {"atten_mask": mask(3, 4, 9)}, "must be 1 or the batch size, 2, but is 3"),
        (attend_prefill, {"atten_mask": mask(2, 4, 4, 9)}, "must be 1, for all heads, but is 4"),
        (attend_prefill, {"atten_mask": t(4, 9)}, "must be bool, int8 or uint8"),
        (attend_prefill, {"atten_mask": mask(4, 18)[:, ::2]}, "atten_mask must be contiguous"),
        (attend_prefill, {"quant_scale2": t(1, dtype=FLOAT)}, "quantized output .* is not emulated"),
        (attend_prefill, {"antiquant_scale": t(2)}, "quantized cache .* is not emulated"),
        (attend, int8_cache(16), "block_size of an int8 cache must be a multiple of 32, but is 16"),
        (attend, {**int8_cache(32), "value_antiquant_scale": None}, "must be given together"),
        (attend, {**int8_cache(32), "key_antiquant_mode": 4}, "key_antiquant_mode than 5, .* is not emulated"),
        (attend, {**int8_cache(32), "value_antiquant_mode": 4}, "must be equal"),
        (
            attend,
            {**int8_cache(32), "key_antiquant_scale": t(8, 32, 2, dtype=FLOAT)},
            r"must have shape \[8, 2, 32\], not \[8, 32, 2\]",
        ),
        (attend, {**int8_cache(32), "key_antiquant_scale": t(8, 2, 32, dtype=BF16)}, "must be float32 and contiguous"),
        (attend, {**int8_cache(32), "key": t(8, 32, 128)}, "or int8 with key_antiquant_scale"),
        (
            attend_prefill,
            {"query_rope": t(2, 4, 4, 64), "key_rope": t(2, 2, 9, 64)},
            "latent attention .* is not emulated",
        ),
        (attend_prefill, {"kv_padding_size": t(1, dtype=INT64)}, "left padding .* is not emulated"),
        (
            attend_prefill,
            {"key_shared_prefix": t(1, 2, 9, 64), "value_shared_prefix": t(1, 2, 9, 64)},
            "shared prefix .* is not emulated",
        ),
        (attend_packed, {"actual_seq_lengths": None}, "a TND layout requires actual_seq_lengths"),
        (attend_packed, {"actual_seq_lengths_kv": None}, "a TND layout requires actual_seq_lengths_kv"),
        (attend_packed, {"actual_seq_lengths": [3, 2]}, "must be cumulative, but 2 follows 3"),
        (attend_packed, {"actual_seq_lengths": [2, 4]}, "must end with T = 5, but ends with 4"),
        (attend_packed, {"actual_seq_lengths": [5]}, "must have the same number of entries, but have 1 and 2"),
        (attend_packed, {"actual_seq_lengths": [0] * 4096 + [5]}, "must have at most 4096 entries, but has 4097"),
        (
            attend_packed,
            {"atten_mask": mask(5, 9)},
            "atten_mask in a TND layout requires sparse_mode 2, 3 or 4, but sparse_mode is 0",
        ),
        (attend_packed, paged(4, 24), "multiple of 16 and at most 1024"),
        (attend_packed, paged(4, 128) | {"actual_seq_lengths_kv": [0, 0]}, "must not all be 0"),
        (attend_packed, paged(1, 128), "at most the cache's 1 blocks, .* but need 2"),
        (attend_blocks, {"actual_seq_lengths_kv": [129, 130]}, "at most the cache's 3 blocks, .* but need 4"),
        (
            attend_packed,
            {name: t(rows, heads, 272) for name, rows, heads in packed_shapes},
            "the head dimension in TND must be at most 256, but is 272",
        ),
        *(
            (
                attend_packed,
                {name: t(rows, heads, 256) for name, rows, heads in packed_shapes} | change,
                "the head dimension in a TND layout must be 64 or 128",
            )
            for change in (
                {"inner_precise": 1},
                {"sparse_mode": 2, "atten_mask": mask(2048, 2048)},
                {
                    "key": t(4, 2, 128, 256),
                    "value": t(4, 2, 128, 256),
                    "block_table": t(2, 1, dtype=INT32),
                    "block_size": 128,
                    "actual_seq_lengths_kv": [4, 5],
                },
                paged(4, 528, 512, HALF),
            )
        ),
        (
            attend_packed,
            {name: t(heads, rows, 256) for name, rows, heads in packed_shapes} | {"input_layout": "NTD"},
            "the head dimension in a TND layout must be 64 or 128",
        ),
    ]


@pytest.mark.parametrize("number", range(len(attention())), ids=[reason[:40] for _, _, reason in attention()])
def test_attention(number: int) -> None:
    call, changes, reason = attention()[number]
    call()  # valid without the change
    with pytest.raises(RuntimeError, match=reason):
        call(**changes)
    torch.npu.synchronize()


def quantized(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "x1": t(4, 64, dtype=INT8),
        "x2": t(64, 32, dtype=INT8),
        "scale": t(32, dtype=FLOAT),
        "pertoken_scale": t(4, dtype=FLOAT),
        "output_dtype": HALF,
    }
    arguments |= changes
    return torch_npu.npu_quant_matmul(arguments.pop("x1"), arguments.pop("x2"), arguments.pop("scale"), **arguments)


def mixed(**changes: Any) -> Any:
    """Run int8 activations with int4 weights, in groups of 256 rows."""
    arguments: dict[str, Any] = {
        "x1": t(4, 512, dtype=INT8),
        "x2": t(512, 4, dtype=INT32),
        "scale": t(2, 32, dtype=INT64),
        "pertoken_scale": t(4, 1, dtype=FLOAT),
        "offset": t(32, dtype=FLOAT),
        "output_dtype": HALF,
        "group_sizes": [0, 0, 256],
    }
    arguments |= changes
    return torch_npu.npu_quant_matmul(arguments.pop("x1"), arguments.pop("x2"), arguments.pop("scale"), **arguments)


def weighted(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"x": t(4, 64), "weight": t(64, 32, dtype=INT8), "antiquant_scale": t(32)}
    return torch_npu.npu_weight_quant_batchmatmul(**{**arguments, **changes})


def scattered(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "key": t(4, 2, 64),
        "value": t(4, 2, 64),
        "key_cache": t(8, 16, 2, 64),
        "value_cache": t(8, 16, 2, 64),
        "slot_mapping": torch.arange(4, dtype=INT32).npu(),
        "cache_mode": "Norm",
    }
    return torch_npu.npu_scatter_pa_kv_cache(**{**arguments, **changes})


def fused_cache(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "qkv": t(4, 1024),
        "q_gamma": t(128),
        "k_gamma": t(128),
        "cos": t(4, 128),
        "sin": t(4, 128),
        "index": torch.arange(4).npu(),
        "q_out": t(4, 512),
        "k_cache": t(8, 16, 16, 16),
        "v_cache": t(8, 16, 16, 16),
        "qkv_size": [4, 1, 8, 128],
        "head_nums": [4, 2, 2],
    }
    return torch_npu.npu_qkv_rms_norm_rope_cache(**{**arguments, **changes})


def call(function: str, *arguments: Any, **keywords: Any) -> Callable[[], Any]:
    return lambda: getattr(torch_npu, function)(*arguments, **keywords)


def changed(function: Callable[..., Any], **changes: Any) -> Callable[[], Any]:
    return lambda: function(**changes)


def others() -> Iterator[tuple[Callable[[], Any], str]]:
    x, gamma = t(4, 64), t(64)
    yield call("npu_rms_norm", x, t(32)), "gamma must have the shape of x's last dimensions"
    yield call("npu_rms_norm", x, t(64, dtype=BF16)), "gamma must have x's dtype"
    yield call("npu_rms_norm", t(4, 64, dtype=INT32), t(64, dtype=INT32)), "float16, bfloat16 or float32"
    yield call("npu_add_rms_norm", x, t(3, 64), gamma), "x1 and x2 must have the same shape and dtype"
    yield call("npu_add_rms_norm", x, t(4, 64, dtype=BF16), gamma), "x1 and x2 must have the same shape and dtype"
    yield call("npu_add_rms_norm", x, x, t(64, dtype=FLOAT)), "gamma must have x1's dtype"
    yield call("npu_add_rms_norm_cast", x.float(), x.float(), gamma.float()), "float16 or bfloat16"
    yield call("npu_add_rms_norm_quant", x, x, gamma, t(64), None), "scales1 must be Float with Half input"
    yield call("npu_add_rms_norm_quant", x, x, gamma, t(1, dtype=FLOAT), None), "scales1 must have gamma's shape"
    yield (
        call("npu_add_rms_norm_quant", x, x, gamma, t(64, dtype=FLOAT), t(64)),
        "zero_points must be Int with Float scales",
    )
    wide = t(4, 64, dtype=BF16)
    yield (
        call("npu_add_rms_norm_quant", wide, wide, t(64, dtype=BF16), t(64, dtype=BF16), t(64, dtype=INT32)),
        "zero_points must be BFloat16 with BFloat16 scales",
    )
    yield (
        call("npu_add_rms_norm_dynamic_quant", x, x, gamma, smooth_scale1=t(32)),
        "smooth_scale1 must have gamma's shape",
    )
    yield call("npu_add_rms_norm_dynamic_quant", x, x, gamma, beta=t(64, dtype=FLOAT)), "beta must have gamma's dtype"
    yield (
        call("npu_add_rms_norm_dynamic_quant", x, x, gamma, smooth_scale1=gamma, output_mask=[False, True]),
        "output_mask must be True for each output with a smooth scale",
    )
    yield call("npu_rms_norm_quant", x, gamma, gamma, t(64), t(64, dtype=INT8)), r"scale must have shape \[1\]"
    yield call("npu_rms_norm_quant", x, gamma, gamma, t(1), t(1, dtype=INT32)), r"offset must be int8 of shape \[1\]"
    yield call("npu_quantize", x, t(63, dtype=FLOAT), None, torch.qint8, -1), "1 element or as many as x has"
    yield call("npu_quantize", x, t(64, dtype=FLOAT), None, torch.qint8, -1, False), "scale must have x's dtype"
    yield call("npu_quantize", x, t(64, dtype=BF16), None, torch.qint8, -1), "scales must be float32 or have x's dtype"
    yield (
        call("npu_quantize", x, t(64, dtype=FLOAT), t(64, dtype=BF16), torch.qint8, -1),
        "scales and x must be bfloat16",
    )
    yield call("npu_quantize", x, t(64, dtype=FLOAT), t(64, dtype=FLOAT), torch.qint8, -1), "zero_points must be int32"
    yield call("npu_dynamic_quant", x.float()), "x must be float16 or bfloat16"
    yield call("npu_dynamic_quant", x, smooth_scales=t(64, dtype=FLOAT)), "smooth_scales must have x's dtype"
    yield (
        call("npu_dynamic_quant", x, smooth_scales=t(2, 64), group_index=t(2, dtype=INT64)),
        "group_index must be int32",
    )
    yield call("npu_rotary_mul", t(2, 3, 4, 63), t(2, 3, 1, 63), t(2, 3, 1, 63)), "even and below 896"
    yield call("npu_rotary_mul", t(2, 3, 4, 896), t(2, 3, 1, 896), t(2, 3, 1, 896)), "even and below 896"
    yield call("npu_rotary_mul", t(2, 3, 4, 64), t(2, 2, 1, 64), t(2, 2, 1, 64)), "must be 1 or the input's, 3"
    rotary = t(2, 3, 1, 64)
    yield (
        call("npu_apply_rotary_pos_emb", t(2, 3, 4, 32), t(2, 3, 4, 32), t(2, 3, 1, 32), t(2, 3, 1, 32)),
        "must be 64 or 128",
    )
    yield (
        call("npu_apply_rotary_pos_emb", t(2, 3, 4, 64), t(2, 3, 4, 64), rotary, rotary, "BNSD"),
        r"layout must be 1 \(BSND\) or 4 \(TND\)",
    )
    yield (
        call("npu_apply_rotary_pos_emb", t(2, 3, 4, 64), t(2, 3, 4, 64), rotary, rotary, rotary_mode="quarter"),
        "rotary_mode must be 'half'",
    )
    turned, wide_heads = t(2, 1, 128, dtype=BF16), [t(2, heads, 128, dtype=BF16) for heads in (69, 8)]
    yield (
        call("npu_apply_rotary_pos_emb", *wide_heads, turned, turned, "TND"),
        "must fit into the unified buffer of 196608 bytes, but take 199168",
    )
    yield call("npu_interleave_rope", t(2, 3, 4, 32), t(2, 1, 4, 32), t(2, 1, 4, 32)), "must have shape .B, N, S, 64."
    positions = torch.arange(4).npu()
    yield call("npu_mrope", positions, t(4, 96), t(4, 96), t(9, 48), 48), "multiples of 32"
    yield (
        call(
            "npu_mrope", positions.expand(3, 4).contiguous(), t(4, 64), t(4, 64), t(9, 64), 64, mrope_section=[8, 8, 8]
        ),
        "the sum of mrope_section must be rotary_dim / 2, 32, but is 24",
    )
    rows = positions.expand(3, 4).contiguous()
    turned_by_rows = call("npu_mrope", rows, t(4, 64), t(4, 64), t(9, 64), 64, mrope_section=[12, 10, 10])
    yield turned_by_rows, "mrope_section must be .16, 24, 24."
    one_row = call("npu_mrope", positions, t(4, 64), t(4, 64), t(9, 64), 64, mrope_section=[8, 12, 12])
    yield one_row, "positions must have shape .3 or 4, tokens."
    yield call("npu_swiglu", t(4, 63)), "must be even"
    yield call("npu_swiglu_quant", t(4, 64), quant_mode=0), "static quantization requires smooth_scales and offsets"
    yield (
        call("npu_swiglu_quant", t(4, 64), quant_mode=1, dst_type=torch.quint4x2),
        "int4 output of SwiGluQuantV2 is not emulated",
    )
    yield call("npu_dequant_swiglu_quant", t(4, 128, dtype=INT32), quant_mode=1), "int32 x requires weight_scale"
    yield call("npu_dequant_swiglu_quant", t(4, 128), quant_mode=0), "static quantization requires quant_scale"
    static = {"quant_mode": 0, "quant_scale": t(1, dtype=FLOAT)}
    yield call("npu_dequant_swiglu_quant", t(4, 128), **static), "without group_index requires quant_offset"
    yield (
        call("npu_dequant_swiglu_quant", t(4, 128), **static, quant_offset=t(1, dtype=INT32)),
        "quant_offset must be float32",
    )
    yield (
        call("npu_dequant_swiglu_quant", t(4, 128), **static, quant_offset=t(64, dtype=FLOAT)),
        "quant_offset must have as many elements as quant_scale, 1, but has 64",
    )
    yield (
        call("npu_dequant_swiglu_quant", t(4, 128), quant_mode=1, quant_scale=t(2, dtype=FLOAT)),
        "quant_scale must have 1 element or H = 64",
    )
    yield call("npu_dequant_swiglu_quant", t(4, 9832), quant_mode=1), "must take less than 196608 bytes together"
    yield (
        call("npu_dequant_swiglu_quant", t(4, 100), quant_mode=1, group_index=t(1, dtype=INT64)),
        "H must be a multiple of 64 and at most 10496, but is 50",
    )
    yield changed(quantized, x1=t(4, 65, dtype=INT8)), "x1 must have as many columns as x2 has rows, 64, but has 65"
    wide_factors = {"x1": t(4, 65536, dtype=INT8), "x2": t(65536, 32, dtype=INT8)}
    yield changed(quantized, **wide_factors, pertoken_scale=None, output_dtype=BF16), "at most 65535, but are 65536"
    yield changed(quantized, scale=t(31, dtype=FLOAT)), "scale must have 1 element or N = 32, not 31"
    yield changed(quantized, pertoken_scale=t(5, dtype=FLOAT)), r"pertoken_scale must be float32 of shape \[M\]"
    yield changed(quantized, scale=t(32, dtype=BF16)), "requires a float32 scale"
    yield changed(quantized, scale=t(32, dtype=INT64), output_dtype=BF16), "requires a float32 or bfloat16 scale"
    yield changed(quantized, pertoken_scale=None, bias=t(32)), "bias must be int32 with a Half output"
    yield changed(quantized, bias=t(32, dtype=BF16)), "bias must be int32, float32 or have the output's dtype"
    yield changed(quantized, offset=t(32, dtype=FLOAT)), "requires an int8 output"
    yield changed(quantized, group_sizes=[0, 0, 256]), "group_sizes without int8 x1 and int4 x2 is not emulated"
    yield changed(mixed, x1=t(4, 510, dtype=INT8)), "x1 must have as many columns as x2 has rows, 512, but has 510"
    odd = {"x1": t(4, 511, dtype=INT8), "x2": t(511, 4, dtype=INT32)}
    yield changed(mixed, **odd), "a multiple of 256, but is 511"
    wide = {"x1": t(4, 29952, dtype=INT8), "x2": t(29952, 4, dtype=INT32), "scale": t(117, 32, dtype=INT64)}
    yield changed(mixed, **wide), "K must be at most 29576"
    yield changed(mixed, group_sizes=None), "group_sizes must be .0, 0, 256. with a scale of 2 dimensions"
    yield changed(mixed, scale=t(32, dtype=INT64)), "and omitted with a scale of 1 dimension"
    yield changed(mixed, scale=t(2, 32, dtype=FLOAT)), "scale must be the int64 output of TransQuantParam"
    yield changed(mixed, scale=t(3, 32, dtype=INT64)), "for groups of 256 rows, with K = 512 and N = 32"
    yield changed(mixed, pertoken_scale=t(4, dtype=FLOAT)), "pertoken_scale must be float32 of shape .M., or .M, 1."
    yield changed(mixed, offset=None), "offset must be float32 of shape .N."
    yield changed(mixed, bias=t(32, dtype=INT32)), "bias must be omitted with int8 x1 and int4 x2"
    yield changed(mixed, output_dtype=INT8), "out must be float16 or bfloat16"
    yield changed(weighted, weight=t(64, 32)), "weight must be int8, or int4 in int32"
    yield changed(weighted, antiquant_scale=t(31)), "antiquant_scale must have 1 or 32 elements, but has 31"
    yield changed(weighted, antiquant_scale=t(32, dtype=BF16)), "antiquant_scale must have x's dtype"
    batches = t(2, 4, 8), t(2, 8, 5)
    yield (
        call("npu_transpose_batchmatmul", *batches, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[0, 1, 2]),
        "perm_y must be",
    )
    yield (
        call("npu_transpose_batchmatmul", *batches, perm_x1=[0, 2, 1], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]),
        "perm_x1 must be",
    )
    yield call("npu_scatter_nd_update_", t(4, 8), t(2, 1), t(2, 8)), "indices must be int32 or int64"
    yield (
        call("npu_scatter_nd_update_", t(4, 8), t(2, 1, dtype=INT32), t(2, 7)),
        "must have the shape that indices select",
    )
    yield (
        call("npu_scatter_nd_update_", t(4, 8), t(2, 3, dtype=INT32), t(2)),
        "last dimension of indices must be between 1",
    )
    yield changed(scattered, cache_mode="ND"), "cache_mode must be Norm or PA_NZ"
    yield changed(scattered, cache_mode="PA_NZ"), "with cache_mode PA_NZ, key_cache must have shape"
    yield changed(scattered, key_cache=t(8, 16, 2, 64, dtype=BF16)), "key_cache must have the dtype of key"
    yield changed(scattered, slot_mapping=t(4)), "slots must be int32 or int64"
    yield changed(scattered, slot_mapping=t(5, dtype=INT32)), r"slots must have shape \[4\], one slot for each token"
    yield changed(scattered, seq_lens=t(4, dtype=INT32)), "compressed caches .* are not emulated"
    yield changed(fused_cache, cache_mode="PA"), "cache_mode must be PA_NZ"
    yield changed(fused_cache, head_nums=[5, 2, 2]), "qkv_size and head_nums must agree with qkv"
    yield changed(fused_cache, qkv_size=[4, 1, 16, 64], head_nums=[8, 4, 4]), "D must be 128, but is 64"
    few = t(3, 16, 16, 16)
    yield changed(fused_cache, k_cache=few, v_cache=few), r"at least ceil\(S / block_size\) \* B = 4 blocks, but have 3"
    yield changed(fused_cache, index=torch.arange(4, dtype=INT32).npu()), "index must be int64"
    yield changed(fused_cache, k_cache=t(8, 8, 16, 32)), "k_cache and v_cache must have shape .blocks, Nk"
    yield changed(fused_cache, k_scale=t(2, 128, dtype=FLOAT)), "a quantized cache is not emulated"
    yield call("npu_top_k_top_p", t(2, 9, dtype=FLOAT), t(2), t(2, dtype=INT32)), "and the logits' dtype"
    yield call("npu_top_k_top_p", t(2, 9), t(2), t(2, dtype=INT64)), r"k must be int32 of shape \[batch\]"


def test_the_calls_that_are_changed_work() -> None:
    for function in (quantized, mixed, weighted, scattered, fused_cache):
        function()
    torch.npu.synchronize()


@pytest.mark.parametrize("number", range(sum(1 for _ in others())))
def test_operation(number: int) -> None:
    function, reason = list(others())[number]
    with pytest.raises(RuntimeError, match=reason):
        function()
    torch.npu.synchronize()


def at_run_time() -> Iterator[tuple[Callable[[], Any], str]]:
    """Yield calls that are refused only because of a tensor's content, and the reasons."""
    yield (
        changed(scattered, slot_mapping=torch.tensor([0, 1, 2, 128], dtype=INT32).npu()),
        "slots must be less than the cache's capacity, 128, but one is 128",
    )
    yield (
        changed(attend, block_table=t(2, 4, dtype=INT32) * 8),
        "the block numbers in block_table must be between 0 and 7, but one is 8",
    )
    yield (
        changed(attend_prefill, sparse_mode=3, atten_mask=mask(2048, 2048)),
        "must be True above the diagonal and False elsewhere",
    )
    yield (
        call("npu_scatter_nd_update_", t(4, 8), t(2, 1, dtype=INT32) * 4, t(2, 8)),
        "indices must be between 0 and 3 in dimension 0",
    )


@pytest.mark.parametrize("number", range(4))
def test_contents(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    function, reason = list(at_run_time())[number]
    function()
    with pytest.raises(RuntimeError, match="507015") as error:
        torch.npu.synchronize()
    assert reason in str(error.value) + capfd.readouterr().err
    (t(2) + 1).cpu()  # The device keeps working.
