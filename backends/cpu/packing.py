"""Weights in oneDNN's packed layout, where a measurement finds it faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from statistics import geometric_mean

import torch
from torch import Tensor
from torch.nn import functional

ROWS = (1, 8, 32)
"""Batch sizes to measure at if the config names none."""
MIN_SPEEDUP = 1.05
"""Minimum speedup for packing; less is noise."""

SAMPLE_BYTES = 32 << 20
"""Amount of weights to measure: part of a large weight, or copies of a small one."""
MAX_COPIES = 16
MIN_BYTES = 64 << 10
"""Minimum size of a weight to pack. A smaller one fits in a CPU cache, and measuring it costs more than it gains."""

log = logging.getLogger("hal.cpu")


_measured: dict[tuple[torch.Size, torch.dtype, tuple[int, ...], int], list[float]] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :func:`hal.ops.linear`. The weight may be one that :class:`Packing` prepared."""
    if not weight.is_mkldnn:
        return functional.linear(x, weight, bias)
    table = getattr(weight, "table", None)
    if table is not None and x.numel() > weight.rows * x.shape[-1]:  # type: ignore[attr-defined]
        return functional.linear(x, table, bias)
    return _packed_linear(x, weight, bias)


class Packing:
    """Packs weights where this is faster, measured once per process for each shape and list of batch sizes.

    Args:
        release: returns freed memory to the system. A measurement takes more than most weights, and what it leaves
            between live tensors would stay resident.
    """

    def __init__(self, release: Callable[[], None] = lambda: None) -> None:
        self._release = release

    def prepare(self, weight: Tensor, *, shared: bool, sizes: Sequence[int] = ROWS) -> Tensor:
        """Return the weight, or a packed copy of the same size.

        Args:
            weight: ``[out_features, in_features]``.
            shared: whether the plain weight has other uses too. Both forms are then kept, and each call uses the
                faster one for its number of rows. Otherwise only one is kept: the faster one on average.
            sizes: batch sizes in ascending order. Of more than three, the first, middle and last are measured.
        """
        if weight.dim() != 2 or weight.nbytes < MIN_BYTES or not _can_pack(weight.dtype):
            return weight
        rows = tuple(sizes) if len(sizes) <= 3 else (sizes[0], sizes[len(sizes) // 2], sizes[-1])
        key = weight.shape, weight.dtype, rows, torch.get_num_threads()
        if key not in _measured:
            _measured[key] = _speedups(weight[: SAMPLE_BYTES // weight[0].nbytes], rows)
            self._release()
        speedups = _measured[key]
        pays = speedups[0] > MIN_SPEEDUP if shared else geometric_mean(speedups) > MIN_SPEEDUP
        log.debug(
            "speedup of packing %s %s at %s rows with %d threads: %s", *key, [round(each, 2) for each in speedups]
        )
        if not pays:
            return weight
        made = packed(weight)
        if shared and min(speedups) <= MIN_SPEEDUP:
            faster = takewhile(lambda each: each[1] > MIN_SPEEDUP, zip(rows, speedups, strict=True))
            made.table, made.rows = weight, max(size for size, _ in faster)  # type: ignore[attr-defined]
        return made


def _can_pack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs the dtype. Few processors support float16, which is left out."""
    return dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available()


def _speedups(weight: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return the speedup of the packed layout for each number of rows, on weights larger than the caches."""
    copies = min(SAMPLE_BYTES // weight.nbytes, MAX_COPIES)
    plain = [weight, *(weight.clone() for _ in range(copies - 1))]
    in_layout = [packed(each) for each in plain]
    speedups = []
    for rows in sizes:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        took = [
            (_seconds(x, plain), _seconds(x, in_layout)) for _ in range(4)
        ]  # interleaved, so that noise affects both
        by_torch, by_packing = (min(each) for each in zip(*took, strict=True))
        speedups.append(by_torch / by_packing)
    return speedups


def _seconds(x: Tensor, weights: Sequence[Tensor]) -> float:
    start = time.thread_time()  # excludes the time in which other processes have the core
    for weight in weights:
        linear(x, weight)
    return time.thread_time() - start


def packed(weight: Tensor) -> Tensor:
    """Return a packed copy of a weight ``[out_features, in_features]``."""
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return result


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result
