"""CUDA runtime functions for the tests of the emulator, called with ctypes, in this process or in a subprocess."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from .libraries import RUNTIME, libraries

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""cudaStreamCaptureModeGlobal, ThreadLocal and Relaxed."""
NON_BLOCKING = 1
"""cudaStreamNonBlocking."""


class Calls:
    """Wraps CUDA functions. They return the text of the error that CUDA reports, or "no error"."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(libraries() / RUNTIME))
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> str:
        """Call any function of the runtime; integers are passed as 64 bits, for addresses and handles."""
        given = [ctypes.c_uint64(each) if isinstance(each, int) else each for each in arguments]
        error = getattr(self._library, function)(*given)
        text: bytes = self._library.cudaGetErrorString(error)
        return text.decode()

    def made(self, function: str, *arguments: object) -> int:
        """Return the handle or address that a function writes to its first argument."""
        place = ctypes.c_uint64()
        assert (said := self.call(function, ctypes.byref(place), *arguments)) == "no error", said
        return place.value

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.made("cudaStreamCreateWithPriority", flags, 0)

    def event(self) -> int:
        return self.made("cudaEventCreate")

    def memory(self, size: int) -> int:
        return self.made("cudaMalloc", size)

    def fill(self, address: int, value: int, size: int, stream: int) -> str:
        return self.call("cudaMemsetAsync", address, value, size, stream)

    def read(self, address: int, size: int, stream: int) -> bytes:
        """Read memory with a copy to pageable memory, which waits for the stream."""
        found = ctypes.create_string_buffer(size)
        assert self.call("cudaMemcpyAsync", ctypes.addressof(found), address, size, 4, stream) == "no error"
        return found.raw

    def begin(self, stream: int, mode: int = RELAXED) -> str:
        return self.call("cudaStreamBeginCapture", stream, mode)

    def end(self, stream: int) -> tuple[str, int]:
        """End a capture; return the error and the graph."""
        graph = ctypes.c_uint64()
        return self.call("cudaStreamEndCapture", stream, ctypes.byref(graph)), graph.value

    def launched(self, graph: int, stream: int) -> str:
        executable = self.made("cudaGraphInstantiateWithFlags", graph, 0)
        return self.call("cudaGraphLaunch", executable, stream)


def in_a_process(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a subprocess, with `cuda` and this module's names.

    Options set variables EMULATED_CUDA_<OPTION>.
    """
    environ = dict(os.environ)
    environ |= {f"EMULATED_CUDA_{name.upper()}": str(value) for name, value in options.items()}
    code = f"from emulated_cuda.calls import *\ncuda = Calls()\n{code}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
