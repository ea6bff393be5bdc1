"""Tests for memory: bounds, initial contents, capacity, and what copies wait for."""

from __future__ import annotations

import signal

import pytest
from emulated_cuda.calls import Calls, in_a_process

MIB = 1 << 20


@pytest.mark.parametrize("offset", [-4096, 256 * 5])
def test_out_of_bounds_is_a_fault(offset: int) -> None:
    """Access the page before an allocation and the page at its end."""
    ran = in_a_process(
        f"p = cuda.memory(256 * 5)\nctypes.string_at(p, 256 * 5)\nprint('inside', flush=True)\n"
        f"ctypes.string_at(p + {offset}, 1)\nprint('outside')"
    )
    assert ran.returncode == -signal.SIGSEGV, ran.stderr
    assert ran.stdout.split() == ["inside"]


def test_freed_memory_is_a_fault() -> None:
    ran = in_a_process("p = cuda.memory(100)\nprint(cuda.call('cudaFree', p), flush=True)\nctypes.string_at(p, 1)")
    assert ran.returncode == -signal.SIGSEGV, ran.stderr
    assert ran.stdout == "no error\n"


def test_new_memory_is_nan(cuda: Calls) -> None:
    address = cuda.memory(64)
    assert cuda.read(address, 64, 0) == b"\xff" * 64
    assert cuda.call("cudaFree", address) == "no error"
    assert cuda.call("cudaFree", address) == "invalid argument"


def test_there_is_as_much_as_was_chosen() -> None:
    ran = in_a_process(
        f"""
first = cuda.memory(60 * {MIB})
place = ctypes.c_uint64()
print(cuda.call("cudaMalloc", ctypes.byref(place), 60 * {MIB}))
print(cuda.call("cudaGetLastError"))
print(cuda.call("cudaFree", first))
cuda.memory(60 * {MIB})
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
print(free.value >> 20, total.value >> 20)
""",
        memory=100,
    )
    assert ran.stdout.splitlines() == ["out of memory", "out of memory", "no error", "40 100"], ran.stderr


def test_what_a_copy_from_the_host_takes() -> None:
    """A copy from pageable memory reads the bytes at the call; one from pinned memory reads them when it runs."""
    ran = in_a_process(
        """
import collections
found = collections.Counter()
stream = cuda.stream()
for turn in range(40):
    address, pinned, pageable = cuda.memory(8), cuda.made("cudaHostAlloc", 8, 0), ctypes.create_string_buffer(b"old")
    ctypes.memmove(pinned, b"old", 4)
    for kind, source in (("pinned", pinned), ("pageable", ctypes.addressof(pageable))):
        cuda.call("cudaMemcpyAsync", address, source, 4, 4, stream)
        ctypes.memmove(source, b"new", 4)
        found[kind, cuda.read(address, 3, stream).decode()] += 1
print(*sorted("-".join(each) for each in found))
""",
        seed=3,
    )
    assert ran.stdout.split() == ["pageable-old", "pinned-new", "pinned-old"], ran.stdout + ran.stderr
