"""Memory of the host for tensors that are read again and again, such as weights and caches: in huge pages.

Long reads then miss the processor's table of pages less often. Where Linux does not provide huge pages, it is ordinary
memory. It is given back to the system with its last tensor; the C library would keep it, and not always use it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Bytes of a huge page of x86, and of Arm with pages of 4 KiB."""
CHUNK = 32 << 20
"""Bytes of memory that small tensors share."""
ALIGNMENT = 128
"""Bytes to which a tensor is aligned: two lines of a cache, which some processors fetch together."""


class HostMemory:
    """Some memory.

    Args:
        nbytes: how many bytes.
    """

    def __init__(self, nbytes: int) -> None:
        whole = nbytes // HUGE_PAGE * HUGE_PAGE
        self._memory = mmap.mmap(-1, nbytes + (HUGE_PAGE if whole else 0), access=mmap.ACCESS_COPY)
        start = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE if whole else 0
        if whole and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that was built without them
                self._memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
        self._at, self._end = start, start + nbytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return the next of it as a tensor, or None if not enough is left."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes > self._end - self._at:
            return None
        taken = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=self._at)
        self._at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return taken.view(dtype).view(shape)


def give_back_pages(places: Iterable[tuple[int, int]]) -> int:
    """Return whole pages of memory to the system, which gives pages of zeros where they are next used.

    Args:
        places: the first address of each tensor, and the one after its last. Those that lie side by side share pages.

    Returns:
        The bytes that were returned; 0 where the system is not Linux.
    """
    if sys.platform != "linux":
        return 0
    ranges: list[tuple[int, int]] = []
    for start, end in sorted(set(places)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(end, ranges[-1][1])
        else:
            ranges.append((start, end))
    advise, returned = ctypes.CDLL(None, use_errno=True).madvise, 0
    for start, end in ranges:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if nbytes > 0 and not advise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
            returned += nbytes
    return returned


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor alone in its memory."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    taken = HostMemory(nbytes).take(shape, dtype) if nbytes else None
    return torch.empty(shape, dtype=dtype) if taken is None else taken


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros alone in its memory, all of which is taken now."""
    return host_empty(shape, dtype).zero_()


class SharedChunks:
    """Chunks of memory that successive small tensors share. A chunk is given back with its last tensor."""

    def __init__(self) -> None:
        self._chunk: HostMemory | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy."""
        if not 0 < tensor.nbytes <= CHUNK // 4:
            return host_empty(tensor.shape, tensor.dtype).copy_(tensor)
        place = None if self._chunk is None else self._chunk.take(tensor.shape, tensor.dtype)
        if place is None:
            self._chunk = HostMemory(CHUNK)
            place = self._chunk.take(tensor.shape, tensor.dtype)
            assert place is not None
        return place.copy_(tensor)
