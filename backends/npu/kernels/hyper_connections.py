"""Hyper-connections with npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post, where these take a call, else composed.

torch_npu's documentation has them for 950 alone. CANN's newest says A2 and A3 as well, where users found no kernels.

Source: torch_npu's documentation of the three.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from hal.ops import HyperConnectionOptions, operation
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.partial_kernel import PartialKernel

from ..soc import Generation
from .latent_attention import lacking

COUNTS = (4, 6, 8)
"""The numbers of streams."""
WIDEST, ALIGNED = 16384, 16
"""The most features of a stream, and what they are a multiple of."""

_collapsed, _expanded = (operation(name).reference for name in ("collapse_streams", "expand_streams"))


def kernels(generation: Generation) -> dict[str, Kernel]:
    """Return the kernels by operation; none for a generation without the operators."""
    if not generation.hyper_connections:
        return {}
    return {
        "collapse_streams": PartialKernel("collapse_streams", collapse_streams, supports=(), composes=lacks),
        "expand_streams": expand_streams,
    }


def lacks(streams: Tensor, *rest: Any) -> tuple[str, ...]:
    """Return what npu_mhc_pre and npu_mhc_sinkhorn do not take of a call of ``collapse_streams``."""
    _, count, width = streams.shape
    options: HyperConnectionOptions = rest[-1]
    return lacking(
        (count in COUNTS, "{} streams", count),
        (width % ALIGNED == 0 and width <= WIDEST, "streams of {} features", width),
        (1 <= options.iterations <= 100, "{} iterations", options.iterations),
        (streams.dtype is not torch.float32, "streams in {}", streams.dtype),
    )


def collapse_streams(
    streams: Tensor, projection: Tensor, base: Tensor, scale: Tensor, options: HyperConnectionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.collapse_streams`. Two launches."""
    if lacks(streams, options) or not streams.shape[0]:
        found: tuple[Tensor, Tensor, Tensor] = _collapsed(streams, projection, base, scale, options)
        return found
    eps = {"norm_eps": options.norm_eps, "hc_eps": options.eps}
    collapsed, post, mix, *_ = torch_npu.npu_mhc_pre(streams, projection, scale, base, **eps)
    return collapsed, post, torch_npu.npu_mhc_sinkhorn(mix, eps=options.eps, num_iters=options.iterations)[0]


def expand_streams(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """See :func:`hal.ops.expand_streams`. One launch, except in float32."""
    if streams.dtype is torch.float32 or not streams.shape[0]:
        return _expanded(streams, output, post, mix)  # type: ignore[no-any-return]
    return torch_npu.npu_mhc_post(streams, mix, output, post)  # type: ignore[no-any-return]
