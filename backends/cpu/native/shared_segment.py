"""The segment of memory that the ranks of a group share, if they are on one machine.

The segment has no name that could stay behind: rank 0 makes it with ``memfd_create``, and the others open it through
``/proc``. Linux frees it when the last rank has ended, however it ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import attrs
from torch import distributed

from hal.device.group import Group
from hal.errors import CommunicationError

Value = TypeVar("Value")

TOKEN = 16
"""Bytes at the start of the segment that tell it from others."""


@attrs.frozen
class SharedSegment:
    """A mapped segment, and the processes of the ranks.

    Attributes:
        memory: the mapping.
        processes: the process ID of each rank.
        handles: a file descriptor of each rank's process, which is readable after the process has ended.
    """

    memory: mmap.mmap
    processes: Sequence[int]
    handles: Sequence[int]

    def close(self) -> None:
        """Close the file descriptors. The mapping ends with its last reference."""
        for handle in self.handles:
            os.close(handle)


@attrs.frozen
class _Offer:
    """What a rank tells the others.

    Attributes:
        lacks: why the rank cannot share memory; empty if it can.
        machine: the machine and its namespace of processes.
        descriptor: rank 0's file descriptor of the segment, else -1.
    """

    lacks: str
    machine: str
    host: str
    process: int
    descriptor: int = -1
    token: bytes = b""


def share(group: Group, size: int | None) -> SharedSegment | str:
    """Map a new segment on every rank of a group, or on none. Every rank calls it.

    Args:
        group: the group.
        size: the size of the segment in bytes; None if this rank has no kernels for it.

    Returns:
        The segment, or the reason why the ranks do not share memory, which is the same on all ranks.

    Raises:
        CommunicationError: a rank did not answer.
    """
    with ExitStack() as stack:
        offers = _gathered(group, _offer(group, size, stack))
        if reason := _obstacle(offers):
            return reason
        assert size is not None
        mapped = _mapped(offers, size)
        answers = _gathered(group, mapped if isinstance(mapped, str) else "")
        # Rank 0's file descriptor is closed here: every rank has mapped the segment, or given up.
    failed = next((f"rank {rank} {answer}" for rank, answer in enumerate(answers) if answer), None)
    if failed is None:
        assert not isinstance(mapped, str)
        return mapped
    if not isinstance(mapped, str):
        mapped.close()
    return failed


def _offer(group: Group, size: int | None, stack: ExitStack) -> _Offer:
    lacks = "" if size is not None else "has no C++ kernels"
    if sys.platform != "linux":
        return _Offer(lacks or f"runs on {sys.platform}, not on Linux", sys.platform, socket.gethostname(), os.getpid())
    descriptor, token = -1, b""
    if group.rank == 0 and size is not None:
        token = secrets.token_bytes(TOKEN)
        try:
            descriptor = _created(size, token)
            stack.callback(os.close, descriptor)
        except OSError as error:
            lacks = f"cannot create memory to share: {error}"
    return _Offer(lacks, _machine(), socket.gethostname(), os.getpid(), descriptor, token)


def _created(size: int, token: bytes) -> int:
    descriptor = os.memfd_create("hal-collectives", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # A rank that reads beyond a shortened segment would be killed.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown machine of process {os.getpid()}"


def _obstacle(offers: Sequence[_Offer]) -> str:
    for rank, offer in enumerate(offers):
        if offer.lacks:
            return f"rank {rank} {offer.lacks}"
        if offer.machine != offers[0].machine:
            same = offer.host == offers[0].host
            return f"rank {rank} is {'in another container' if same else 'on another machine'} than rank 0"
    return ""


def _mapped(offers: Sequence[_Offer], size: int) -> SharedSegment | str:
    handles: list[int] = []
    try:
        memory = _opened(offers[0], size)
        for offer in offers:
            handles.append(os.pidfd_open(offer.process))
    except OSError as error:
        for handle in handles:
            os.close(handle)
        return f"cannot map the memory of rank 0: {error}"
    return SharedSegment(memory, [offer.process for offer in offers], handles)


def _opened(offer: _Offer, size: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, size)
    except ValueError as error:  # of mmap, for a file that is too short
        raise OSError(str(error)) from None
    finally:
        os.close(descriptor)
    if memory[:TOKEN] != offer.token:
        raise OSError("the file is another one")
    return memory


def _gathered(group: Group, value: Value) -> list[Value]:
    found: list[Value] = [value] * group.size
    try:
        distributed.all_gather_object(found, value, group=group.process_group)
    except RuntimeError as error:
        raise CommunicationError(
            f"the ranks of the group {group.name!r} did not meet before their first collective, as rank {group.rank} "
            f"of {group.size} sees it: {str(error).partition(chr(10))[0]}",
            "look for the first error of another rank, and start the ranks anew",
        ) from error
    return found
