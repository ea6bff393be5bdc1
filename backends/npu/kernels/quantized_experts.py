"""Int8 kernels for mixtures of experts, on the generations A2, A3 and 950.

Sources: the documentation of torch_npu and of CANN's ops-transformer. With bfloat16 results, npu_grouped_matmul takes
scales in bfloat16, so that weights' scales are rounded at load.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hal.ops.kernels.kernel_table import Kernel

from .experts import COUNTS, DYNAMIC, expert_unpermute, grouped_matmul, permuted
from .kernels import FRACTAL_NZ, in_fractal_nz
from .quantized import SiluAndMulQuantize, quantize, silu_and_mul_dynamic_quantize


class QuantizedExperts:
    """The int8 kernels.

    Args:
        device: the device.
        fuses: whether weights are in FRACTAL_NZ and npu_grouped_matmul_swiglu_quant_v2 takes them in it.
    """

    def __init__(self, device: torch.device, *, fuses: bool) -> None:
        self._silu_and_mul_quantize = SiluAndMulQuantize(device)
        self._fuses = fuses
        self._zeros: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernels, by operation."""
        return {
            "grouped_linear_int8": self.grouped_linear_int8,
            "quant_expert_mlp_dynamic": self.quant_expert_mlp_dynamic,
            "quant_expert_mlp_static": self.quant_expert_mlp_static,
            "quant_grouped_linear_dynamic": quant_grouped_linear_dynamic,
            "quant_grouped_linear_static": quant_grouped_linear_static,
        }

    def grouped_linear_int8(self, x: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor) -> Tensor:
        """See :func:`hal.ops.grouped_linear_int8`. The offset is required, and 0."""
        if not x.shape[0]:
            return x.new_empty(0, weight.shape[1])
        scale = weight_scale.to(x.dtype)
        zeros = self._zeros.get((scale.shape, scale.dtype))
        if zeros is None:  # the scales were not prepared
            zeros = torch.zeros_like(scale)
        return grouped_matmul(x, weight, counts, antiquant_scale=[scale], antiquant_offset=[zeros])

    def prepared_int8_scale(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scales of int8 weights without int8 activations in ``dtype``, and keep an offset of 0 for them."""
        rounded = scale.to(dtype)
        if (scale.shape, dtype) not in self._zeros:
            self._zeros[scale.shape, dtype] = torch.zeros_like(rounded)
        return rounded

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
        if self._fuses and min(gate_up.shape) > 1 and _in_fractal_nz(gate_up):
            activated, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                rows, [gate_up.transpose(1, 2)], [gate_up_scale], scale, counts, group_list_type=COUNTS
            )
        else:
            merged = quant_grouped_linear_dynamic(rows, scale, gate_up, gate_up_scale, counts, x.dtype)
            activated, scale = silu_and_mul_dynamic_quantize(merged)
        output = quant_grouped_linear_dynamic(activated, scale, down, down_scale, counts, x.dtype)
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
        merged = quant_grouped_linear_static(rows, gate_up, gate_up_scale, gate_up_bias, counts, x.dtype)
        activated = self._silu_and_mul_quantize(merged, down_input_scale, down_input_offset)
        output = quant_grouped_linear_static(activated, down, down_scale, down_bias, counts, x.dtype)
        return expert_unpermute(output, positions, weights)


def _in_fractal_nz(weight: Tensor) -> bool:
    """Return whether a weight was prepared. A fake tensor has no format; it stands for a model's weight, which was."""
    return isinstance(weight, FakeTensor) or torch_npu.get_npu_format(weight) == FRACTAL_NZ


def quant_grouped_linear_static(
    x: Tensor, weight: Tensor, deq_scale: Tensor, quant_bias: Tensor | None, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_static`."""
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1], dtype=dtype)
    scale, bias = rounded_scale(deq_scale, dtype), None if quant_bias is None else [quant_bias]
    return grouped_matmul(x, weight, counts, scale=[scale], bias=bias, output_dtype=dtype)


def quant_grouped_linear_dynamic(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """See :func:`hal.ops.quant_grouped_linear_dynamic`."""
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1], dtype=dtype)
    scale = rounded_scale(weight_scale, dtype)
    return grouped_matmul(x, weight, counts, scale=[scale], per_token_scale=[x_scale], output_dtype=dtype)


def rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in the dtype that npu_grouped_matmul takes: bfloat16 for bfloat16 results, otherwise float32.

    Prepared weights have it already.
    """
    return scale.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def prepared_int8_weight(weight: Tensor, nz: bool) -> Tensor:
    """Return int8 weights of experts, ``[num_experts, out_features, in_features]``, in the kernels' format.

    FRACTAL_NZ holds the transpose, which npu_grouped_matmul_swiglu_quant_v2 requires; the result is a view of that.
    """
    if not nz or min(weight.shape) == 1:
        return weight
    return in_fractal_nz(weight.transpose(1, 2).contiguous()).transpose(1, 2)
