"""Tests for rare argument forms that CANN documents for fused operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu

GENERATOR = torch.Generator().manual_seed(0)
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32


def t(*shape: int, dtype: torch.dtype = HALF) -> Any:
    return torch.randn(shape, generator=GENERATOR).to(dtype).npu()


def integers(*shape: int, dtype: torch.dtype = torch.int8) -> Any:
    return torch.randint(-9, 9, shape, generator=GENERATOR).to(dtype).npu()


class TestCaches:
    def test_operands_that_are_not_contiguous(self):
        key, value = t(4, 2, 64), t(4, 2, 64)
        both = torch.zeros(8, 2, 16, 2, 64, dtype=HALF).npu()  # [blocks, key or value, ...]
        slots = torch.tensor([3, 17, 40, 127], dtype=torch.int32).npu()
        wide = torch.cat((value, value), -1)[..., :64]
        torch_npu.npu_scatter_pa_kv_cache(key, wide, both[:, 0], both[:, 1], slots, cache_mode="Norm")
        expected = torch.zeros(8 * 16, 2, 64, dtype=HALF)
        for index, rows in ((0, key), (1, value)):
            expected.zero_()
            expected[slots.cpu().long()] = rows.cpu()
            assert torch.equal(both[:, index].cpu().reshape(8 * 16, 2, 64), expected)

    def test_fractals_of_two_dtypes(self):
        key, value = integers(4, 2, 64), t(4, 2, 64)
        caches = torch.zeros(8, 4, 16, 32, dtype=torch.int8).npu(), torch.zeros(8, 8, 16, 16).half().npu()
        slots = torch.tensor([0, 1, 2, 16], dtype=torch.int32).npu()
        torch_npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="PA_NZ")
        rows = [cache.cpu().transpose(1, 2).reshape(8 * 16, 2, 64)[slots.cpu().long()] for cache in caches]
        assert torch.equal(rows[0], key.cpu())
        assert torch.equal(rows[1], value.cpu())

    def test_one_rotation_for_all_positions(self):
        kv, gamma, cos, sin = t(2, 1, 3, 576), t(512), t(2, 1, 1, 64), t(2, 1, 1, 64)
        index = torch.arange(3).expand(2, 3).contiguous().npu()

        def run(cos: Any, sin: Any) -> Any:
            caches = torch.zeros(2, 1, 8, 64).half().npu(), torch.zeros(2, 1, 8, 512).half().npu()
            torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, *caches, cache_mode="Norm")
            return caches[0].cpu()

        repeated = [each.expand(2, 1, 3, 64).contiguous() for each in (cos, sin)]
        assert torch.equal(run(cos, sin), run(*repeated))

    def test_an_interleaved_rotation_of_a_view(self):
        x, cos, sin = t(2, 4, 3, 64).transpose(1, 2), t(2, 1, 4, 64), t(2, 1, 4, 64)
        rotated = torch_npu.npu_interleave_rope(x, cos, sin)
        assert torch.equal(rotated.cpu(), torch_npu.npu_interleave_rope(x.contiguous(), cos, sin).cpu())


class TestQuantisation:
    def test_a_product_wider_than_65535(self):
        x1, x2 = integers(2, 65536), integers(65536, 32)
        scale, rows = torch.full((32,), 2.0**-12).npu(), torch.ones(2).npu()
        out = torch_npu.npu_quant_matmul(x1, x2, scale, pertoken_scale=rows, output_dtype=HALF)
        expected = (x1.cpu().long() @ x2.cpu().long()).float() * 2.0**-12
        assert torch.allclose(out.cpu().float(), expected, rtol=1e-3, atol=0.1)

    @pytest.mark.parametrize(("dtype", "scales", "zeros"), [(FLOAT, BF16, None), (BF16, BF16, torch.int32)])
    def test_bfloat16_scales(self, dtype, scales, zeros):
        x, scale = t(4, 64, dtype=dtype), torch.full((64,), 0.125, dtype=scales).npu()
        zero = None if zeros is None else torch.full((64,), 3, dtype=zeros).npu()
        out = torch_npu.npu_quantize(x, scale, zero, torch.qint8, -1)
        expected = torch.round(x.cpu().float() / 0.125 + (0 if zeros is None else 3))
        assert torch.equal(out.cpu().int(), expected.clamp(-128, 127).int())

    def test_a_bias_for_each_group(self):
        x, scale = integers(6, 256, dtype=torch.int32), t(2, 256, dtype=FLOAT).abs()
        bias, groups = integers(2, 256, dtype=torch.int32), torch.tensor([2, 4]).npu()
        rows, others = [0, 0, 1, 1, 1, 1], {"activate_left": True, "quant_mode": 1}
        quantized = {"activation_scale": torch.ones(6, 1).npu(), "quant_scale": torch.ones(2, 128).npu(), **others}
        out = torch_npu.npu_dequant_swiglu_quant(x, weight_scale=scale, bias=bias, group_index=groups, **quantized)
        summed = x + bias.cpu()[rows].npu()
        expected = torch_npu.npu_dequant_swiglu_quant(summed, weight_scale=scale, group_index=groups, **quantized)
        assert torch.equal(out[0].cpu(), expected[0].cpu())
        assert torch.equal(out[1].cpu(), expected[1].cpu())


def test_more_than_64_queries_share_a_key():
    query, key, value = t(1, 65, 1, 64), t(1, 1, 9, 64), t(1, 1, 9, 64)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query, key, value, num_heads=65, num_key_value_heads=1, input_layout="BNSD", scale=0.125
    )
    expected = torch.softmax(query.cpu().float() @ key.cpu().float().mT * 0.125, -1) @ value.cpu().float()
    assert torch.allclose(out.cpu().float(), expected, atol=2e-3)
