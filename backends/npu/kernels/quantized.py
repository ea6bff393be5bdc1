"""Kernels of the operations on int8 (W8A8).

What the operators demand is in the documents of torch_npu and of CANN's ops-nn, and in the latter's sources where
those disagree: npu_add_rms_norm_quant takes scales of float32 and offsets of int32 with bfloat16 too, and
npu_dequant_swiglu_quant takes no groups.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from hal.ops.kernels.kernel_table import Kernel

from .kernels import in_fractal_nz

SWIGLU_BYTES = 192 * 1024
"""npu_dequant_swiglu_quant without groups holds ten rows of x on the chip, and its factors; they must be below this."""
FP19 = 13
"""TransQuantParam cuts so many bits off a float32 scale."""


def kernels(device: torch.device) -> dict[str, Kernel]:
    """By operation."""
    return {
        "add_rms_norm_dynamic_quantize": add_rms_norm_dynamic_quantize,
        "add_rms_norm_quantize": add_rms_norm_quantize,
        "dynamic_quantize": dynamic_quantize,
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
    """See :func:`hal.ops.quant_linear_static`. A float32 scale with float16 results costs a launch at each call."""
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
    """``silu_and_mul_quantize``: one launch where there is no offset and x is not too wide, else two.

    npu_dequant_swiglu_quant wants an offset, of float32, which npu_quantize does not take: hence 0 is kept here.
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
    """See :func:`hal.ops.silu_and_mul_dynamic_quantize`. One launch where x is not too wide, else two."""
    if not _fits(x):
        return dynamic_quantize(torch_npu.npu_swiglu(x, dim=-1))
    quantized, scale = torch_npu.npu_dequant_swiglu_quant(x.flatten(0, -2), activate_left=True, quant_mode=1)
    return quantized.view(*x.shape[:-1], -1), scale.view(x.shape[:-1])


def _fits(x: Tensor) -> bool:
    """Whether npu_dequant_swiglu_quant takes it."""
    return x.numel() > 0 and 10 * x.shape[-1] * x.element_size() + 8 < SWIGLU_BYTES


def prepared_int8_weight(weight: Tensor, nz: bool) -> Tensor:
    """An int8 weight ``[out_features, in_features]`` as the kernels take it.

    Args:
        weight: what the checkpoint has, on the device.
        nz: whether in FRACTAL_NZ: then it is the transpose that is in it, which is how CANN wants it, and what is
            returned is a view of that. A weight with a side of 1 stays as it is: CANN has no such in FRACTAL_NZ.
    """
    if not nz or min(weight.shape) == 1:
        return weight
    return in_fractal_nz(weight.t().contiguous()).t()


def prepared_deq_scale(deq_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales of a static projection as npu_quant_matmul takes them for results of ``dtype``.

    For bfloat16 as they are. For float16 as 64 bits each, in which CANN has room for 19 bits of a float32: they are
    rounded to these, to nearest, where TransQuantParam by itself would cut.
    """
    if dtype != torch.float16:
        return deq_scale
    bits = deq_scale.cpu().view(torch.int32)
    rounded = bits + ((1 << (FP19 - 1)) - 1) + (bits >> FP19 & 1) & -(1 << FP19)
    packed: Tensor = torch_npu.npu_trans_quant_param(rounded.view(torch.float32).to(deq_scale.device))
    return packed
