"""Messages of the first rank to the others, which wait for each however long it takes."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
from torch import distributed

from hal.parallel.mesh import Mesh, explained


class RankMessages:
    """Passes messages of the first rank of a mesh to the others. Every rank makes one at the same time.

    Threading: one thread at a time.

    Args:
        mesh: the ranks.

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
