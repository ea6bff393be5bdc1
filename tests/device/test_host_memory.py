"""Memory of the host in huge pages."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from hal.device.host_memory import ALIGNMENT, CHUNK, HUGE_PAGE, SharedChunks, host_empty, host_zeros


def mapped() -> int:
    """Return the bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (3, HUGE_PAGE)])
def test_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = host_zeros(shape, dtype)
    assert (zeros.shape, zeros.dtype) == (torch.Size(shape), dtype)
    assert not zeros.view(torch.uint8 if shape else dtype).any()
    whole = zeros.nbytes >= HUGE_PAGE
    assert not whole or zeros.data_ptr() % HUGE_PAGE == 0


def test_small_tensors_lie_side_by_side() -> None:
    chunks, given = SharedChunks(), [torch.full((count, 3), count) for count in range(1, 100)]
    kept = [chunks.copy(each) for each in given]
    for each, copy in zip(given, kept, strict=True):
        assert torch.equal(each, copy)
        assert copy.data_ptr() % ALIGNMENT == 0
    ends = [each.data_ptr() + each.nbytes for each in kept]
    assert all(0 <= after.data_ptr() - end < ALIGNMENT for end, after in zip(ends, kept[1:], strict=False))
    large = torch.ones(CHUNK // 2, dtype=torch.int8)
    assert torch.equal(chunks.copy(large), large)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_memory_is_given_back() -> None:
    chunks = SharedChunks()
    kept, alone = [chunks.copy(torch.ones(CHUNK // 32)) for _ in range(24)], host_empty((CHUNK,), torch.int8)
    before = mapped()
    del alone, kept, chunks
    gc.collect()
    assert before - mapped() >= 4 * CHUNK
