"""Int8 kernels for mixtures of experts, on the generations A2, A3 and 950.

Sources: the documentation of torch_npu and of CANN's ops-transformer. With bfloat16 results, npu_grouped_matmul takes
scales in bfloat16, so that weights' scales are rounded at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import Tensor

from hal.ops.kernels.kernel_table import Kernel

from .experts import COUNTS, DYNAMIC, add_bias, expert_unpermute, grouped_matmul, permuted
from .kernels import in_transposed_nz, is_fractal_nz
from .quantized import SiluAndMulQuantize, quantize, silu_and_mul_dynamic_quantize

if TYPE_CHECKING:
    from hal.nn import WeightUse


class QuantizedExperts:
    """The int8 kernels.

    Args:
        device: the device.
        fuses: whether weights are in FRACTAL_NZ and npu_grouped_matmul_swiglu_quant_v2 takes them in it.
    """

    def __init__(self, device: torch.device, *, fuses: bool) -> None:
        self._silu_and_mul_quantize = SiluAndMulQuantize(device)
        self._fuses = fuses

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernels of MLPs, by operation."""
        return {
            "quant_expert_mlp_dynamic": self.quant_expert_mlp_dynamic,
            "quant_expert_mlp_static": self.quant_expert_mlp_static,
        }

    def quant_expert_mlp_dynamic(
        self,
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        experts: Tensor,
    ) -> Tensor:
        """See :func:`hal.ops.quant_expert_mlp_dynamic`. Four launches with weights in FRACTAL_NZ, otherwise five."""
        if not x.shape[0]:
            return torch.empty_like(x)
        rows, counts, positions, scale = permuted(x, experts, gate_up.shape[0], DYNAMIC)
        if self._fuses and min(gate_up.shape) > 1 and is_fractal_nz(gate_up):
            activated, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                rows, [gate_up.mT], [gate_up_scale.squeeze(-1)], scale, counts, group_list_type=COUNTS
            )
        else:
            merged = grouped_linear(rows, gate_up, counts, None, gate_up_scale, None, scale, x.dtype)
            activated, scale = silu_and_mul_dynamic_quantize(merged)
        output = grouped_linear(activated, down, counts, None, down_scale, None, scale, x.dtype)
        return expert_unpermute(output, positions, weights)

    def quant_expert_mlp_static(
        self,
        x: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_bias: Tensor | None,
        down_input_scale: Tensor,
        down_input_offset: Tensor | None,
        down: Tensor,
        down_scale: Tensor,
        down_bias: Tensor | None,
        weights: Tensor,
        experts: Tensor,
    ) -> Tensor:
        """See :func:`hal.ops.quant_expert_mlp_static`. x is quantized once, before its rows are copied."""
        if not x.shape[0]:
            return torch.empty_like(x)
        rows, counts, positions, _ = permuted(quantize(x, scale, offset), experts, gate_up.shape[0])
        merged = grouped_linear(rows, gate_up, counts, gate_up_bias, gate_up_scale, None, None, x.dtype)
        activated = self._silu_and_mul_quantize(merged, down_input_scale, down_input_offset)
        output = grouped_linear(activated, down, counts, down_bias, down_scale, None, None, x.dtype)
        return expert_unpermute(output, positions, weights)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """See :func:`hal.ops.grouped_linear`. npu_grouped_matmul takes a bias in int32 only."""
    weight_scale, _, x_scale, dtype, *_ = rest
    added = None if bias is None or bias.dtype is torch.int32 else bias
    values = grouped_matmul(
        x,
        weight,
        counts,
        bias=None if bias is added else [bias],
        scale=[_rounded(weight_scale, dtype).squeeze(-1)],
        per_token_scale=None if x_scale is None else [x_scale],
        output_dtype=dtype,
    )
    return values if added is None else add_bias(values, added, counts)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in the dtype that npu_grouped_matmul takes: bfloat16 for bfloat16 results, otherwise float32."""
    return scale.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def prepared(weights: Mapping[str, Tensor], use: WeightUse, *, nz: bool) -> Mapping[str, Tensor]:
    """Return weights in the dtypes of :func:`grouped_linear`, and in FRACTAL_NZ if ``nz``."""
    weight = in_transposed_nz(weights["weight"]) if nz else weights["weight"]
    return {**weights, "weight": weight, "weight_scale": _rounded(weights["weight_scale"], use.dtype)}
