"""HCCL and CANN's runtime through ctypes and numpy, without torch: a process that uses it starts in a moment.

A program is a function ``program(rank, ranks, *arguments)`` of a script. `launch` starts it in one process per rank.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"sum": 0, "prod": 1, "max": 2, "min": 3}
_NAMES = ("int8", "int16", "int32", "float16", "float32", "int64", "uint64", "uint8", "uint16", "uint32", "float64")
TYPES = {name: number for number, name in enumerate((*_NAMES, "bfloat16"))}
MAGIC, CONFIG_BYTES, NAME_AT, TIMEOUT_AT = 0xF0F0F0F0, 4096, 32, 316


class Failed(Exception):
    """A function of CANN returned an error code."""

    def __init__(self, name: str, code: int, reason: str) -> None:
        super().__init__(f"{name}: {code}: {reason}")
        self.code = code


class Cann:
    """The functions of libhccl.so and of the runtime. An attribute is a function, which raises `Failed`."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL("libascendcl.so", mode=ctypes.RTLD_GLOBAL)
        self._hccl = ctypes.CDLL("libhcomm.so", mode=ctypes.RTLD_GLOBAL)
        self._runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._hccl if name.startswith("Hccl") else self._runtime, name)

        def call(*arguments: Any) -> None:
            if code := function(*arguments):
                reason = self._runtime.aclGetRecentErrMsg() or b""
                raise Failed(name, code, reason.decode())

        return call


cann = Cann()


def number(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


class Buffer:
    """Device memory with the elements of an array."""

    def __init__(self, data: np.ndarray) -> None:
        self.shape, self.dtype, self.bytes = data.shape, data.dtype, data.nbytes
        self.address = ctypes.c_void_p()
        cann.aclrtMalloc(ctypes.byref(self.address), number(max(self.bytes, 32)), 0)
        self.write(data)

    def write(self, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        if self.bytes:
            cann.aclrtMemcpy(
                self.address, number(self.bytes), data.ctypes.data_as(ctypes.c_void_p), number(self.bytes), 1
            )

    def read(self) -> np.ndarray:
        result = np.empty(self.shape, self.dtype)
        if self.bytes:
            cann.aclrtMemcpy(
                result.ctypes.data_as(ctypes.c_void_p), number(self.bytes), self.address, number(self.bytes), 2
            )
        return result

    def free(self) -> None:
        cann.aclrtFree(self.address)


def config(name: str = "", seconds: int | None = None) -> Any:
    """Return an HcclCommConfig."""
    result = (ctypes.c_char * CONFIG_BYTES)()
    ctypes.c_uint32.from_buffer(result, 8).value = MAGIC
    ctypes.memmove(ctypes.addressof(result) + NAME_AT, name.encode(), len(name))
    ctypes.c_int32.from_buffer(result, TIMEOUT_AT).value = -1 if seconds is None else seconds
    return result


class Communicator:
    """A rank's communicator and the stream on which it calls collectives."""

    def __init__(self, handle: ctypes.c_void_p, device: int) -> None:
        self.handle, self.device = handle, device
        cann.aclrtSetDevice(device)
        self.stream = ctypes.c_void_p()
        cann.aclrtCreateStream(ctypes.byref(self.stream))
        self.rank, self.ranks = (self._query(name) for name in ("HcclGetRankId", "HcclGetRankSize"))

    def _query(self, name: str) -> int:
        value = ctypes.c_uint32()
        getattr(cann, name)(self.handle, ctypes.byref(value))
        return value.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        cann.HcclGetCommName(self.handle, text)
        return text.value.decode()

    @property
    def asynchronous_error(self) -> int:
        value = ctypes.c_int()
        cann.HcclGetCommAsyncError(self.handle, ctypes.byref(value))
        return value.value

    def all_reduce(self, send: Buffer, receive: Buffer, count: int, dtype: str = "float32", op: str = "sum") -> None:
        arguments = send.address, receive.address, number(count), TYPES[dtype], NAMES[op]
        cann.HcclAllReduce(*arguments, self.handle, self.stream)

    def reduce(
        self, send: Buffer, receive: Buffer, count: int, dtype: str = "float32", op: str = "sum", root: int = 0
    ) -> None:
        arguments = send.address, receive.address, number(count), TYPES[dtype], NAMES[op], root
        cann.HcclReduce(*arguments, self.handle, self.stream)

    def reduce_scatter(self, send: Buffer, receive: Buffer, count: int, dtype: str, op: str = "sum") -> None:
        arguments = send.address, receive.address, number(count), TYPES[dtype], NAMES[op]
        cann.HcclReduceScatter(*arguments, self.handle, self.stream)

    def broadcast(self, buffer: Buffer, count: int, dtype: str = "float32", root: int = 0) -> None:
        cann.HcclBroadcast(buffer.address, number(count), TYPES[dtype], root, self.handle, self.stream)

    def scatter(self, send: Buffer, receive: Buffer, count: int, dtype: str, root: int = 0) -> None:
        arguments = send.address, receive.address, number(count), TYPES[dtype], root
        cann.HcclScatter(*arguments, self.handle, self.stream)

    def all_gather(self, send: Buffer, receive: Buffer, count: int, dtype: str = "float32") -> None:
        arguments = send.address, receive.address, number(count), TYPES[dtype]
        cann.HcclAllGather(*arguments, self.handle, self.stream)

    def all_to_all(self, send: Buffer, receive: Buffer, count: int, dtype: str) -> None:
        side = number(count), TYPES[dtype]
        cann.HcclAlltoAll(send.address, *side, receive.address, *side, self.handle, self.stream)

    def all_to_all_v(self, send: Buffer, receive: Buffer, sent: list[int], received: list[int], dtype: str) -> None:
        sides = (numbers(sent), numbers(starts(sent))), (numbers(received), numbers(starts(received)))
        arguments = send.address, *sides[0], TYPES[dtype], receive.address, *sides[1], TYPES[dtype]
        cann.HcclAlltoAllV(*arguments, self.handle, self.stream)

    def all_to_all_vc(self, send: Buffer, receive: Buffer, matrix: list[list[int]], dtype: str) -> None:
        counts = numbers([each for row in matrix for each in row])
        arguments = send.address, counts, TYPES[dtype], receive.address, TYPES[dtype]
        cann.HcclAlltoAllVC(*arguments, self.handle, self.stream)

    def all_gather_v(self, send: Buffer, receive: Buffer, counts: list[int], dtype: str) -> None:
        lists = numbers(counts), numbers(starts(counts))
        arguments = send.address, number(counts[self.rank]), receive.address, *lists, TYPES[dtype]
        cann.HcclAllGatherV(*arguments, self.handle, self.stream)

    def reduce_scatter_v(self, send: Buffer, receive: Buffer, counts: list[int], dtype: str, op: str = "sum") -> None:
        arguments = send.address, numbers(counts), numbers(starts(counts)), receive.address, number(counts[self.rank])
        cann.HcclReduceScatterV(*arguments, TYPES[dtype], NAMES[op], self.handle, self.stream)

    def barrier(self) -> None:
        cann.HcclBarrier(self.handle, self.stream)

    def send(self, buffer: Buffer, count: int, to: int, dtype: str = "float32") -> None:
        cann.HcclSend(buffer.address, number(count), TYPES[dtype], to, self.handle, self.stream)

    def receive(self, buffer: Buffer, count: int, source: int, dtype: str = "float32") -> None:
        cann.HcclRecv(buffer.address, number(count), TYPES[dtype], source, self.handle, self.stream)

    def part(self, members: list[int], identity: int, name: str = "") -> Communicator | None:
        """Create a communicator of some ranks; None for other ranks."""
        result, whole = ctypes.c_void_p(), ctypes.c_void_p(self.handle.value)
        if self.rank not in members:
            return None
        ranks = (ctypes.c_uint32 * len(members))(*members)
        rank = members.index(self.rank)
        arguments = ctypes.byref(whole), len(members), ranks, number(identity), rank, config(name), ctypes.byref(result)
        cann.HcclCreateSubCommConfig(*arguments)
        return Communicator(result, self.device)

    def synchronize(self) -> None:
        cann.aclrtSynchronizeStream(self.stream)

    def on(self, stream: ctypes.c_void_p) -> Communicator:
        """Return the same communicator, with its calls on another stream."""
        result = copy.copy(self)
        result.stream = stream
        return result

    def capture(self) -> _Capture:
        return _Capture(self)

    def destroy(self) -> None:
        cann.HcclCommDestroy(self.handle)


class _Capture:
    """Captures the communicator's stream in a block; `replay` enqueues the graph."""

    def __init__(self, communicator: Communicator) -> None:
        self._of = communicator
        self._graph = ctypes.c_void_p()

    def __enter__(self) -> _Capture:
        cann.aclmdlRICaptureBegin(self._of.stream, 1)
        return self

    def __exit__(self, *_: object) -> None:
        cann.aclmdlRICaptureEnd(self._of.stream, ctypes.byref(self._graph))

    def replay(self) -> None:
        cann.aclmdlRIExecuteAsync(self._graph, self._of.stream)

    def destroy(self) -> None:
        cann.aclmdlRIDestroy(self._graph)


def starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:each]) for each in range(len(counts))]


def of_devices(devices: Sequence[int]) -> list[Communicator]:
    """Create a communicator whose ranks are devices of this process."""
    handles = (ctypes.c_void_p * len(devices))()
    cann.HcclCommInitAll(len(devices), (ctypes.c_int32 * len(devices))(*devices), handles)
    return [Communicator(ctypes.c_void_p(handle), device) for handle, device in zip(handles, devices, strict=True)]


def connect(rank: int, ranks: int, folder: str, name: str = "", seconds: int | None = None) -> Communicator:
    """Create a communicator of several processes, which exchange the root info through a file."""
    cann.aclrtSetDevice(rank)
    root, path = (ctypes.c_char * 4108)(), Path(folder) / f"root-{name}"
    if rank == 0:
        cann.HcclGetRootInfo(root)
        path.with_suffix(".new").write_bytes(root.raw)
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.002)
    root.raw = path.read_bytes()
    handle = ctypes.c_void_p()
    cann.HcclCommInitRootInfoConfig(ranks, root, rank, config(name, seconds), ctypes.byref(handle))
    return Communicator(handle, rank)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def launch(script: str, program: str, ranks: int, *arguments: Any, **environ: str) -> list[subprocess.Popen[str]]:
    """Start one process per rank. Each prints what `program` returns, as JSON in its last line."""
    options = json.loads(os.environ["EMULATED_CANN_OPTIONS"]) | {"devices": ranks}
    environ = {**os.environ, "EMULATED_CANN_OPTIONS": json.dumps(options), "PYTHONSAFEPATH": "", **environ}
    rest = [json.dumps(each) for each in arguments]
    return [
        subprocess.Popen(
            [sys.executable, script, program, str(rank), str(ranks), *rest],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def run_ranks(
    script: str, program: str, ranks: int, *arguments: Any, seconds: float = 600, **environ: str
) -> list[Any]:
    """Run a script's program in one process per rank; return the results, or the exit codes of killed ones.

    A rank that fails ends the others at once, because they may wait for it. ``seconds`` only bounds a hang.
    """
    processes = launch(str(Path(__file__).parent / script), program, ranks, *arguments, **environ)
    with ThreadPoolExecutor(ranks) as readers:
        try:
            outputs = [readers.submit(each.communicate) for each in processes]
            until = time.monotonic() + seconds
            while any(each.poll() is None for each in processes):
                if any((each.returncode or 0) > 0 for each in processes) or time.monotonic() > until:
                    break
                time.sleep(0.01)
        finally:
            running = [rank for rank, each in enumerate(processes) if each.poll() is None]
            for each in processes:
                each.kill()
        texts = [each.result() for each in outputs]
    failed = [f"rank {rank}:\n{texts[rank][1]}" for rank, each in enumerate(processes) if (each.returncode or 0) > 0]
    assert not failed, "\n".join(failed)
    assert not running, f"ranks {running} did not end within {seconds} s: {texts}"
    return [
        json.loads(out.splitlines()[-1]) if each.returncode == 0 else each.returncode
        for each, (out, _) in zip(processes, texts, strict=True)
    ]


def run(programs: dict[str, Any]) -> None:
    """Run the program that the command line names, in a process of `launch`."""
    program, rank, ranks, *arguments = sys.argv[1:]
    result = programs[program](int(rank), int(ranks), *map(json.loads, arguments))
    sys.stdout.write(f"{json.dumps(result)}\n")
    sys.stdout.flush()
