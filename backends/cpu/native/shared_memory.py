"""Collectives in shared memory, for ranks on one machine; see ``shared_memory.cpp`` for the protocol."""

from __future__ import annotations

import ctypes
import functools
import logging
import select
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from ctypes import c_char_p, c_int, c_int64, c_void_p
from functools import partial

import torch
from torch import Tensor, distributed

from hal.device.group import Group, when_forgotten
from hal.device.host_capacity import usable_cores
from hal.errors import CommunicationError
from hal.ops.kernels.kernel_table import Kernel
from hal.parallel import collectives

from .arguments import DTYPES, bound, require
from .shared_segment import SharedSegment, share

log = logging.getLogger("hal.cpu")

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_gather_rows", "all_to_all")
"""The operations, by their codes in C++."""
TYPES = {**DTYPES, torch.int32: 3, torch.int64: 4}
"""Codes of the dtypes that ranks exchange. Sums are of DTYPES only."""
WAITING, BROKEN, DIFFERS = 1, 2, 3
"""Results of the C++ functions other than 0."""
REASON = 1000
"""Bytes of the explanation that a rank leaves to the others."""
REMEDY = "look for the first error of another rank; the group cannot be used again, so start the ranks anew"

_CALL = struct.Struct("=11q")
_dtypes = {code: dtype for dtype, code in TYPES.items()}
_groups: weakref.WeakKeyDictionary[Group, SharedMemoryGroup | None] = weakref.WeakKeyDictionary()
"""The groups of this process that have met; None for those that do not share memory."""
_meeting = threading.RLock()


@functools.lru_cache(1024)
def _call(operation: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    if len(shape) > 8:
        shape = (-1, *shape[-7:])  # shown as such
    return _CALL.pack(OPERATIONS.index(operation), TYPES[dtype], len(shape), *shape, *[0] * (8 - len(shape)))


def _described(call: bytes) -> str:
    operation, dtype, dimensions, *shape = _CALL.unpack(call)
    return f"{OPERATIONS[operation]} of {shape[:dimensions]} {_dtypes[dtype]}"


class SharedMemoryGroup:
    """A group whose ranks share memory.

    Args:
        library: the C++ kernels.
        group: the group.
        segment: its memory, of which the instance becomes the owner.
    """

    def __init__(self, library: ctypes.CDLL, group: Group, segment: SharedSegment) -> None:
        function = partial(bound, library)
        self._begin = function("exchange_begin", c_int, *[c_void_p] * 4, c_int64, c_int64)
        self._resume = function("exchange_resume", c_int, c_void_p)
        self._fail = function("exchange_fail", None, c_void_p, c_char_p)
        self._reason = function("exchange_reason", c_char_p, c_void_p)
        self._waits_for = function("exchange_waits_for", c_int, c_void_p, c_int)
        self._other = function("exchange_other", c_int, c_void_p, c_void_p)
        self.name, self.rank, self.size, self.timeout = group.name, group.rank, group.size, group.timeout
        self._segment = segment
        self._lock = threading.Lock()
        threads = distributed.get_world_size() * torch.get_num_threads()
        address = ctypes.addressof(ctypes.c_char.from_buffer(segment.memory))
        opened = function("exchange_open", c_void_p, c_void_p, c_int, c_int, c_int)
        self._exchange = opened(address, self.rank, self.size, threads > usable_cores())
        close = function("exchange_close", None, c_void_p)
        self._closing = weakref.finalize(self, _closed, close, self._exchange, segment)

    def run(self, operation: str, x: Tensor, out: Tensor, count: int) -> None:
        """Run a collective. The GIL is released while other ranks are awaited.

        Args:
            operation: its name.
            x: contiguous.
            out: the result, contiguous; x itself at most for all_reduce.
            count: the elements of x, or of its part for each rank.

        Raises:
            CommunicationError: another rank ended, was late, or called another collective; or one did so before.
        """
        call = _call(operation, x.dtype, tuple(x.shape))
        with self._lock:
            if not self._closing.alive:
                raise CommunicationError(
                    f"{_described(call)} {self._where}, whose mesh is closed",
                    "run collectives while the backend is open that made the mesh",
                )
            try:
                width = x.shape[-1] if x.dim() else 1
                status = self._begin(self._exchange, call, x.data_ptr(), out.data_ptr(), count, width)
                if status:
                    self._finish(status, _described(call))
            except CommunicationError:
                raise
            except BaseException as error:
                self._break(f"rank {self.rank} was interrupted in {_described(call)} by {type(error).__name__}")
                raise

    def close(self) -> None:
        """End the use of the memory, which is freed with this instance. Waits for a collective that is running."""
        with self._lock:
            self._closing()

    def _finish(self, status: int, what: str) -> None:
        start = time.monotonic()
        while status:
            if status == BROKEN:
                reason = (self._reason(self._exchange) or b"another rank failed").decode(errors="replace")
                raise CommunicationError(f"{what} {self._where} has failed: {reason}", REMEDY)
            if status == DIFFERS:
                found = ctypes.create_string_buffer(_CALL.size)
                other = self._other(self._exchange, found)
                raise self._broken(
                    f"the ranks called different collectives in the group {self.name!r}: rank {self.rank} {what}, "
                    f"rank {other} {_described(found.raw)}"
                )
            ended = self._ended()  # before the last look at what those ranks have published
            status = self._resume(self._exchange)
            if status == WAITING:
                self._check_others(ended, what, time.monotonic() - start)

    def _check_others(self, ended: set[int], what: str, waited: float) -> None:
        missing = [rank for rank in range(self.size) if self._waits_for(self._exchange, rank)]
        for rank in missing:
            if rank in ended:
                process = self._segment.processes[rank]
                raise self._broken(
                    f"rank {rank} (process {process}) ended before it joined {what} {self._where}, which had waited "
                    f"{waited:.1f} s"
                )
        if missing and waited > self.timeout:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise self._broken(f"{ranks} did not join {what} {self._where} within {waited:.1f} s")

    @property
    def _where(self) -> str:
        return f"in the group {self.name!r} on rank {self.rank} of {self.size}"

    def _ended(self) -> set[int]:
        poll = select.poll()
        for handle in self._segment.handles:
            poll.register(handle, select.POLLIN)
        found = {handle for handle, _ in poll.poll(0)}
        return {rank for rank, handle in enumerate(self._segment.handles) if handle in found}

    def _broken(self, problem: str) -> CommunicationError:
        self._break(problem)
        return CommunicationError(problem, REMEDY)

    def _break(self, reason: str) -> None:
        """Make every later call of any rank fail, so that none pairs with another call."""
        self._fail(self._exchange, reason.encode()[:REASON])


def _closed(close: Kernel, exchange: int, segment: SharedSegment) -> None:
    close(exchange)
    segment.close()


def _forgotten(group: Group) -> None:
    shared = _groups.pop(group, None)
    if shared is not None:
        shared.close()


class SharedMemoryKernels:
    """Kernels of the collectives. A group whose ranks do not share memory uses those of ``torch.distributed``.

    Args:
        library: the C++ kernels; None if there are none.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = library

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The kernels by operation."""
        return {name: getattr(self, name) for name in OPERATIONS}

    def all_reduce(self, x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.all_reduce`. It sums in float32, in the order of ranks, and rounds once."""
        shared = self._of(group)
        if shared is None:
            return collectives.all_reduce(x, group, out)
        require(True, "all_reduce", x)
        x = x.contiguous()
        return _run(shared, "all_reduce", x, out, tuple(x.shape), x.numel())

    def all_gather(self, x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.all_gather`."""
        shared = self._of(group)
        if shared is None:
            return collectives.all_gather(x, group, out)
        require(x.dim() > 0, "all_gather", x)
        x = x.contiguous()
        return _run(shared, "all_gather", x, out, (*x.shape[:-1], shared.size * x.shape[-1]), x.numel())

    def all_gather_rows(self, x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.all_gather_rows`."""
        shared = self._of(group)
        if shared is None:
            return collectives.all_gather_rows(x, group, out)
        require(x.dim() > 0, "all_gather_rows", x, dtypes=TYPES)
        x = x.contiguous()
        return _run(shared, "all_gather_rows", x, out, (shared.size * x.shape[0], *x.shape[1:]), x.numel())

    def reduce_scatter(self, x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.reduce_scatter`. It sums in float32, in the order of ranks, and rounds once."""
        shared = self._of(group)
        if shared is None:
            return collectives.reduce_scatter(x, group, out)
        require(x.dim() > 0 and x.shape[0] % shared.size == 0, "reduce_scatter", x)
        x = x.contiguous()
        shape = (x.shape[0] // shared.size, *x.shape[1:])
        return _run(shared, "reduce_scatter", x, out, shape, x.numel() // shared.size)

    def all_to_all(self, x: Tensor, group: str, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.all_to_all`."""
        shared = self._of(group)
        if shared is None:
            return collectives.all_to_all(x, group, out)
        require(x.dim() > 0 and x.shape[0] % shared.size == 0, "all_to_all", x)
        x = x.contiguous()
        return _run(shared, "all_to_all", x, out, tuple(x.shape), x.numel() // shared.size)

    def _of(self, name: str) -> SharedMemoryGroup | None:
        group = collectives.started(name)
        if group.size == 1:
            return None
        try:
            return _groups[group]
        except KeyError:
            return self._met(group)

    def _met(self, group: Group) -> SharedMemoryGroup | None:
        """Return the memory of a group that is used for the first time. All its ranks arrive here."""
        with _meeting:
            if group in _groups:
                return _groups[group]
            library = self._library
            size = None if library is None else bound(library, "exchange_bytes", c_int64, c_int64)(group.size)
            found = share(group, size)
            if isinstance(found, str):
                if group.rank == 0:
                    log.warning(
                        "the ranks of the group %r exchange tensors over torch.distributed, which is slower than "
                        "shared memory: %s",
                        group.name,
                        found,
                    )
                made = None
            else:
                assert library is not None
                made = SharedMemoryGroup(library, group, found)
            _groups[group] = made
            if made is not None:
                when_forgotten(group, partial(_forgotten, group))
            return made


def _run(
    shared: SharedMemoryGroup, operation: str, x: Tensor, out: Tensor | None, shape: tuple[int, ...], count: int
) -> Tensor:
    result = x.new_empty(shape) if out is None or not out.is_contiguous() else out
    shared.run(operation, x, result, count)
    return result if out is None or out is result else out.copy_(result)
