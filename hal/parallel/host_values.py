"""Values and messages that the hosts of ranks exchange, such as the shapes of steps, and a heartbeat between them.

With the heartbeat, a rank that has finished waits for those that have not, if they do not step together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import distributed

from hal.device.group import Group
from hal.errors import CommunicationError, ConfigError
from hal.parallel.mesh import Mesh, carries_cpu_tensors, explained

Value = TypeVar("Value")
LATE = (
    "look for the first error of another rank; every rank calls Runner.step or Runner.idle until all are done, within "
    "parallel.timeout of the others"
)
INTERVAL = 1.0
"""Seconds between two beats; a quarter of the group's timeout, if that is less."""
RUNNING, FINISHED, FAILED = range(3)
"""What a rank says of itself in a beat."""


def check_host_group(group: Group) -> None:
    """Raise ConfigError unless the group's collectives take CPU tensors."""
    if group.size > 1 and not carries_cpu_tensors(group.process_group):
        raise ConfigError(
            "the hosts of the ranks of `data` exchange values, and their process group does not carry CPU tensors",
            "pass Mesh.of a further group as `hosts`, with the same ranks: torch.distributed.new_group(backend='gloo')",
        )


def gather_numbers(group: Group, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of every rank, in the order of ranks.

    Args:
        group: a group whose collectives take CPU tensors.
        numbers: this rank's, as many as on the other ranks.

    Raises:
        CommunicationError: another rank has ended, or does not come within the group's timeout.
    """
    given = torch.tensor(numbers, dtype=torch.int64)
    gathered = [torch.empty_like(given) for _ in range(group.size)]
    with explained("exchange values with the other data ranks", LATE):
        distributed.all_gather(gathered, given, group=group.process_group)
    return [each.tolist() for each in gathered]


def gather_values(group: Group, value: Value) -> list[Value]:
    """Return the values of every rank, which can be pickled, in the order of ranks; see :func:`gather_numbers`."""
    gathered: list[Any] = [None] * group.size
    with explained("exchange values with the other data ranks", LATE):
        distributed.all_gather_object(gathered, value, group=group.process_group)
    return gathered


class Heartbeat:
    """A block of work whose end waits for the other ranks of a group, however long they take.

    A thread tells the other ranks that this one still runs.

    Args:
        group: a group whose collectives take CPU tensors. Every rank enters the block, and uses the group for nothing
            else in it.

    Raises:
        ConfigError: the process group does not carry CPU tensors.
        CommunicationError: at the end of the block, if another rank raised in it, has ended, or did not answer within
            the group's timeout.
    """

    def __init__(self, group: Group) -> None:
        check_host_group(group)
        self._group, self._interval = group, min(INTERVAL, group.timeout / 4)
        self._state, self._ended = RUNNING, threading.Event()
        self._error: CommunicationError | None = None
        self._thread = threading.Thread(target=self._beat, name="hal-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state = FINISHED if error is None else FAILED
        self._ended.set()
        # A rank that failed tells the others, but does not wait for one that hangs.
        self._thread.join(None if error is None else 2 * self._interval)
        if error is None and self._error is not None:
            raise self._error

    def _beat(self) -> None:
        try:
            states = [RUNNING]
            while set(states) != {FINISHED}:
                self._ended.wait(self._interval)
                states = [state for (state,) in gather_numbers(self._group, [self._state])]
                if FAILED in states:  # All ranks see the same states, so that all threads end.
                    raise CommunicationError(
                        f"rank {states.index(FAILED)} of {self._group.size} raised an exception while rank "
                        f"{self._group.rank} was at work or waited for it",
                        "look for the exception of that rank",
                    )
        except CommunicationError as error:
            self._error = error


class RankMessages:
    """Passes messages of the first rank of a mesh to the others. Every rank makes one at the same time.

    Threading: one thread at a time.

    Attributes:
        alone: whether there is one rank, to which nothing is passed.
        first: whether this rank sends.
        interval: the seconds within which the first rank sends the next message, which may be empty; None if alone.

    Raises:
        CommunicationError: the ranks do not reach each other.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.alone, self.first, self._mesh = mesh.size == 1, mesh.first, mesh
        self.interval = None if self.alone else mesh.tensor.timeout / 4
        if not self.alone:
            # The model's group may not carry CPU tensors, and may be in use when this one is.
            with explained("make a group for messages"):
                self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=mesh.tensor.timeout))

    def passed_on(self, message: bytes) -> bytes:
        """Return the first rank's message. Every rank calls it; the message of the others is not used.

        Raises:
            CommunicationError: another rank has ended, or does not come within the mesh's timeout.
        """
        if self.alone:
            return message
        with explained("pass on a message"):
            length = torch.tensor([len(message)])
            distributed.broadcast(length, 0, group=self._group)
            if not length:
                return b""
            content = torch.frombuffer(bytearray(message if self.first else int(length)), dtype=torch.uint8)
            distributed.broadcast(content, 0, group=self._group)
            return content.numpy().tobytes()

    def close(self) -> None:
        """Free the group."""
        if not self.alone:
            with suppress(ValueError, AssertionError):  # The default group has ended, and with it this one.
                distributed.destroy_process_group(self._group)
