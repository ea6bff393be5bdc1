"""Which products are fast with this processor, build of torch and oneDNN: each function probes one capability, once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch

log = logging.getLogger("hal.cpu")


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs and multiplies weights of the dtype, by trying it.

    oneDNN is there on every processor, and refuses bfloat16 on those without AVX-512. Few processors support float16,
    which is left out.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(64, 64, dtype=dtype))
        torch.ops.mkldnn._linear_pointwise.default(torch.zeros(1, 64, dtype=dtype), weight, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:  # AttributeError: a build of torch without oneDNN
        log.debug("oneDNN packs no weights of %s: %s", dtype, error)
        return False
    return True


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of many rows are fast: float32 for one that oneDNN does not multiply.

    torch's own product of bfloat16 or float16 takes several times as long as one of float32.
    """
    asked: Mapping[torch.dtype, str] = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    if dtype not in asked:
        return dtype
    multiplies = getattr(torch.ops.mkldnn, asked[dtype], None)
    return dtype if multiplies is not None and multiplies() else torch.float32


@functools.cache
def multiplies_int8() -> bool:
    """Return whether torch's int8 matrix product is exact on this processor: without VNNI, it may saturate."""
    extremes = torch.tensor([-128, 127, 127, -128], dtype=torch.int8).repeat_interleave(64).view(4, 64)
    exact = extremes.int() @ extremes.t().int()
    try:
        return torch.equal(torch._int_mm(extremes, extremes.t()), exact)
    except RuntimeError:
        return False
