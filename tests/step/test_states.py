"""Tests of the memory for states on the CPU."""

from __future__ import annotations

import psutil
import pytest
import torch

from hal.step import StateSpec
from hal.step.state import canonical_states

CPU, MIB = torch.device("cpu"), 1 << 20


def spec(num_blocks: int) -> StateSpec:
    """Return the states of one layer, 16 KiB for each block of keys or values."""
    return StateSpec.key_value(1, 4, 64, torch.float32, num_blocks=num_blocks, block_size=16)


def test_pages_are_taken_when_they_are_first_written() -> None:
    before = psutil.Process().memory_info().rss
    memory = canonical_states(spec(1 << 16), CPU)  # 2 GiB
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    key, value = memory.layers[0].values()
    with torch.inference_mode():
        key[1] = 1
    assert key.is_contiguous()
    assert key.is_inference()
    written = [int(tensor[block].count_nonzero()) for tensor in (key, value) for block in (0, 1, -1)]
    assert written == [0, 4096, 0, 0, 0, 0]


def test_the_system_has_the_pages_back() -> None:
    memory = canonical_states(spec(1 << 13), CPU)  # 256 MiB
    with torch.inference_mode():
        for tensor in memory.layers[0].values():
            tensor.fill_(1)
    written = psutil.Process().memory_info().rss
    del memory, tensor
    assert written - psutil.Process().memory_info().rss > 200 * MIB


def test_too_little_memory_is_torchs_error() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        canonical_states(spec(1 << 33), CPU)  # 256 TiB


def test_no_blocks() -> None:
    assert canonical_states(spec(0), CPU).layers[0]["key"].shape == (0, 16, 4, 64)
