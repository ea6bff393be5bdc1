"""Weights in the layout that oneDNN computes on, where measuring says that it pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import takewhile
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional

ROWS = (1, 8, 32)
"""Batch sizes to measure at, where nothing says which will come."""
MARGIN = 1.05
"""What packing must gain: less is noise."""

SAMPLE_BYTES = 32 << 20
"""So much is measured: of a large weight a part, of a small one copies."""
MOST_COPIES = 16
SMALLEST = 64 << 10
"""Bytes. A smaller weight lies in a cache in any form, and measuring it would take longer than it could ever gain."""

log = logging.getLogger("hal.cpu")


_measured: dict[tuple[torch.Size, torch.dtype, tuple[int, ...], int], list[float]] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A projection by a weight as it is or as :class:`Packing` prepared it."""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    table = getattr(weight, "table", None)
    if table is not None and x.numel() > weight.rows * x.shape[-1]:  # type: ignore[attr-defined]
        return functional.linear(x, table, bias)
    return _packed_linear(x, weight, bias)


class Packing:
    """Packs weights, where that pays: measured once in a process for each shape and list of batch sizes."""

    def prepare(self, weight: Tensor, *, shared: bool, sizes: Sequence[int] = ROWS) -> Tensor:
        """The weight as it is, or packed, which takes the same memory again.

        Args:
            weight: ``[out_features, in_features]``.
            shared: whether the weight stays for other uses too. Then both forms are at hand, and each number of rows
                gets the faster one; otherwise there can be only one, and it is packed if that is faster on the whole.
            sizes: batch sizes to measure at, ascending; of many, the first, the middle and the last.
        """
        if weight.dim() != 2 or weight.nbytes < SMALLEST or not _can_pack(weight.dtype):
            return weight
        rows = tuple(sizes) if len(sizes) <= 3 else (sizes[0], sizes[len(sizes) // 2], sizes[-1])
        key = weight.shape, weight.dtype, rows, torch.get_num_threads()
        if key not in _measured:
            _measured[key] = _gains(weight[: SAMPLE_BYTES // weight[0].nbytes], rows)
        gains = _measured[key]
        pays = gains[0] > MARGIN if shared else geometric_mean(gains) > MARGIN
        log.debug("%s %s: at %s rows and %d threads packing gains %s", *key, [round(gain, 2) for gain in gains])
        if not pays:
            return weight
        packed = _pack(weight)
        if shared and min(gains) <= MARGIN:
            most = max(size for size, _ in takewhile(lambda each: each[1] > MARGIN, zip(rows, gains, strict=True)))
            packed.table, packed.rows = weight, most  # type: ignore[attr-defined]
        return packed


def _can_pack(dtype: torch.dtype) -> bool:
    """float16 is packed on few processors only, which this does not look for."""
    return dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()


def _gains(weight: Tensor, sizes: Sequence[int]) -> list[float]:
    """How many times faster the packed form is, for each number of rows; on weights that no cache holds, as in use."""
    copies = min(SAMPLE_BYTES // weight.nbytes, MOST_COPIES)
    plain = [weight, *(weight.clone() for _ in range(copies - 1))]
    packed = [_pack(each) for each in plain]
    gains = []
    for rows in sizes:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        took = [(_seconds(x, plain), _seconds(x, packed)) for _ in range(4)]  # in turns, so that noise hits both
        by_torch, by_packing = (min(each) for each in zip(*took, strict=True))
        gains.append(by_torch / by_packing)
    return gains


def _seconds(x: Tensor, weights: Sequence[Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        linear(x, weight)
    return time.perf_counter() - start


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN would not look at its stride
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result
