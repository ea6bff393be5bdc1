"""Kernels of W8A8: rounding to int8, also fused with what precedes it, and projections.

Sources: the documentation of torch_npu and of CANN's ops-nn, and the sources of ops-nn where these disagree.
npu_add_rms_norm_quant supports float32 scales and int32 offsets with bfloat16 too; npu_dequant_swiglu_quant does not
support groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import Tensor

from hal.ops.kernels.kernel_table import Kernel

from .kernels import in_transposed_nz

if TYPE_CHECKING:
    from hal.nn import WeightUse

SWIGLU_BYTES = 192 * 1024
"""On-chip memory that must hold ten rows of x and its factors in npu_dequant_swiglu_quant without groups."""
FP19_DROPPED_BITS = 13
"""Bits that TransQuantParam truncates from a float32 scale."""


def kernels(device: torch.device) -> dict[str, Kernel]:
    """Return the kernels that round, by operation."""
    return {
        "add_rms_norm_dynamic_quantize": add_rms_norm_dynamic_quantize,
        "add_rms_norm_quantize": add_rms_norm_quantize,
        "dynamic_quantize": dynamic_quantize,
        "float8_quantize": float8_quantize,
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


def float8_quantize(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.float8_quantize`. No operator rounds to float8: it rounds the bits of float32."""
    wide = x.float()
    if scale is None:
        scale = wide.abs().amax(-1) / 448
        scaled = wide / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    else:
        scaled, scale = (wide / scale).clamp(-448, 448), scale.expand(x.shape[:-1]).contiguous()
    bits = scaled.view(torch.int32)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).view(torch.float32)
    return torch.where(scaled.abs() < 2**-6, (scaled * 512).round() / 512, normal).to(x.dtype), scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """See :func:`hal.ops.linear`. For float16 results of static inputs, a scale that was not prepared costs a launch.

    npu_quant_matmul takes a floating-point bias only with a scale for each token, or in bfloat16.
    """
    weight_scale, _, x_scale, dtype, _ = rest
    added = None if bias is None or x_scale is not None or bias.dtype is torch.int32 else bias
    values: Tensor = torch_npu.npu_quant_matmul(
        x,
        weight.t(),
        weight_scale.squeeze(-1),
        pertoken_scale=x_scale,
        bias=bias if added is None else None,
        output_dtype=dtype,
    )
    return values if added is None else values + added


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


def prepared(weights: Mapping[str, Tensor], use: WeightUse, *, nz: bool) -> Mapping[str, Tensor]:
    """Return weights in the format of :func:`linear`: in FRACTAL_NZ if ``nz``, with packed scales if it needs them."""
    found = dict(weights)
    if nz:
        found["weight"] = in_transposed_nz(weights["weight"])
    if use.form.inputs == "static_int8" and use.dtype is torch.float16:
        found["weight_scale"] = packed(rounded(weights["weight_scale"]))
    return found


def rounded(scale: Tensor) -> Tensor:
    """Return scales rounded to the nearest float32 that :func:`packed` holds, which truncates others."""
    bits, dropped = scale.float().cpu().view(torch.int32), FP19_DROPPED_BITS
    bits = bits + ((1 << (dropped - 1)) - 1) + (bits >> dropped & 1) & -(1 << dropped)
    return bits.view(torch.float32).to(scale.device)


def packed(scale: Tensor) -> Tensor:
    """Return float32 scales in the format of npu_quant_matmul, int64, which hold 19 bits of each."""
    return torch_npu.npu_trans_quant_param(scale.flatten()).view(scale.shape)  # type: ignore[no-any-return]
