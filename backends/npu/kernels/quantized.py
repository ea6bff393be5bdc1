"""Kernels of the int8 operations: W8A8, and weights only.

Sources: the documentation of torch_npu and of CANN's ops-nn, and the sources of ops-nn where these disagree.
npu_add_rms_norm_quant supports float32 scales and int32 offsets with bfloat16 too; npu_dequant_swiglu_quant does not
support groups. Weights of npu_weight_quant_batchmatmul are best transposed without FRACTAL_NZ, and plain with it. Its
offset is optional.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from hal.ops.kernels.kernel_table import Kernel

from .kernels import in_fractal_nz

SWIGLU_BYTES = 192 * 1024
"""On-chip memory that must hold ten rows of x and its factors in npu_dequant_swiglu_quant without groups."""
FP19_DROPPED_BITS = 13
"""Bits that TransQuantParam truncates from a float32 scale."""


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Return the int8 kernels, by operation."""
    return {
        "add_rms_norm_dynamic_quantize": add_rms_norm_dynamic_quantize,
        "add_rms_norm_quantize": add_rms_norm_quantize,
        "dynamic_quantize": dynamic_quantize,
        "linear_int8": linear_int8,
        "quant_linear_dynamic": quant_linear_dynamic,
        "quant_linear_static": quant_linear_static,
        "quantize": quantize,
        "silu_and_mul_dynamic_quantize": silu_and_mul_dynamic_quantize,
        "silu_and_mul_quantize": SiluAndMulQuantize(device),
    }


def quantize(x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """See :func:`hal.ops.quantize`."""
    return torch_npu.npu_quantize(x, scale, offset, torch.qint8, -1)  # type: ignore[no-any-return]


def dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.dynamic_quantize`."""
    return torch_npu.npu_dynamic_quant(x)  # type: ignore[no-any-return]


def quant_linear_static(
    x: Tensor, weight: Tensor, deq_scale: Tensor, quant_bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See :func:`hal.ops.quant_linear_static`. A float32 scale with float16 results costs an extra launch."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)
    return torch_npu.npu_quant_matmul(  # type: ignore[no-any-return]
        x, weight.t(), deq_scale, bias=quant_bias, output_dtype=dtype
    )


def quant_linear_dynamic(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See :func:`hal.ops.quant_linear_dynamic`."""
    if x.dim() != 2:
        rows = quant_linear_dynamic(x.flatten(0, -2), x_scale.flatten(), weight, weight_scale, bias, dtype)
        return rows.view(*x.shape[:-1], -1)
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0], dtype=dtype)
    return torch_npu.npu_quant_matmul(  # type: ignore[no-any-return]
        x, weight.t(), weight_scale, pertoken_scale=x_scale, bias=bias, output_dtype=dtype
    )


def linear_int8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """See :func:`hal.ops.linear_int8`. Prepared scales and biases have the kernel's dtypes; others cost launches."""
    if x.dim() != 2:
        return linear_int8(x.flatten(0, -2), weight, weight_scale, bias).view(*x.shape[:-1], -1)
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    added = None if bias is None else prepared_int8_bias(bias, x.dtype)
    return torch_npu.npu_weight_quant_batchmatmul(  # type: ignore[no-any-return]
        x, weight.t(), weight_scale.to(x.dtype), bias=added
    )


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm_quantize`. One launch where scale is ``[width]``, else two."""
    if scale.shape == weight.shape:
        quantized, _, hidden = torch_npu.npu_add_rms_norm_quant(x, residual, weight, scale, offset, epsilon=eps)
        return quantized, hidden
    normed, _, hidden = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
    return quantize(normed, scale, offset), hidden


def add_rms_norm_dynamic_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.add_rms_norm_dynamic_quantize`."""
    quantized, _, hidden, scale, _ = torch_npu.npu_add_rms_norm_dynamic_quant(x, residual, weight, epsilon=eps)
    return quantized, scale, hidden


class SiluAndMulQuantize:
    """``silu_and_mul_quantize``: one launch without an offset and if the rows of x fit on the chip, otherwise two.

    npu_dequant_swiglu_quant requires a float32 offset, which npu_quantize does not support: hence the constant 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.zeros(1, device=device)

    def __call__(self, x: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """See :func:`hal.ops.silu_and_mul_quantize`."""
        if offset is not None or not _fits(x):
            return quantize(torch_npu.npu_swiglu(x, dim=-1), scale, offset)
        rows = x.flatten(0, -2)
        quantized = torch_npu.npu_dequant_swiglu_quant(
            rows, quant_scale=scale[:1], quant_offset=self._zero, activate_left=True, quant_mode=0
        )[0]
        return quantized.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def silu_and_mul_dynamic_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.silu_and_mul_dynamic_quantize`. One launch if the rows of x fit on the chip, otherwise two."""
    if not _fits(x):
        return dynamic_quantize(torch_npu.npu_swiglu(x, dim=-1))
    quantized, scale = torch_npu.npu_dequant_swiglu_quant(x.flatten(0, -2), activate_left=True, quant_mode=1)
    return quantized.view(*x.shape[:-1], -1), scale.view(x.shape[:-1])


def _fits(x: Tensor) -> bool:
    """Return whether npu_dequant_swiglu_quant supports the width of x."""
    return x.numel() > 0 and 10 * x.shape[-1] * x.element_size() + 8 < SWIGLU_BYTES


def prepared_int8_weight(weight: Tensor, nz: bool) -> Tensor:
    """Return an int8 weight ``[out_features, in_features]`` in the kernels' format.

    Args:
        weight: the checkpoint's weight, on the device.
        nz: convert it to FRACTAL_NZ. CANN requires the transpose in this format, so the result is a view of that. A
            weight with a dimension of 1 is returned unchanged: CANN does not support it in FRACTAL_NZ.
    """
    if not nz or min(weight.shape) == 1:
        return weight
    return in_fractal_nz(weight.t().contiguous()).t()


def prepared_int8_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in the dtype that npu_weight_quant_batchmatmul takes for x of ``dtype``."""
    return bias.to(torch.float32 if dtype == torch.bfloat16 else dtype)


def prepared_deq_scale(deq_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales of a static projection in npu_quant_matmul's format for results of ``dtype``.

    For bfloat16 they are unchanged. For float16 each takes 64 bits, which hold 19 bits of a float32. The scales are
    rounded to nearest first, because TransQuantParam truncates.
    """
    if dtype != torch.float16:
        return deq_scale
    bits = deq_scale.cpu().view(torch.int32)
    dropped = FP19_DROPPED_BITS
    rounded = bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1) & -(1 << dropped)
    packed: Tensor = torch_npu.npu_trans_quant_param(rounded.view(torch.float32).to(deq_scale.device))
    return packed
