"""Weights that one rank of a process group broadcasts to the others, such as a trainer to the ranks that generate."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed

from hal.parallel.mesh import explained

_LATE = "look for the first error of another rank; one rank calls send_weights, and all others receive_weights"


def send_weights(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    group: distributed.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
) -> None:
    """Broadcast tensors to the other ranks of a group, which call :func:`receive_weights` at the same time.

    Args:
        tensors: whole tensors by name, on any device. They need not be contiguous.
        group: the group, of which this rank sends; None for the default group.
        device: where the group's collectives take tensors, such as ``npu:0`` for HCCL.

    Raises:
        CommunicationError: another rank has failed, or does not come within the group's timeout.
    """
    channel = _Channel(group, distributed.get_rank(group), device)
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        channel.describe({"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape]})
        channel.move(tensor.detach().to(channel.device).contiguous())
    channel.describe(None)


def receive_weights(
    group: distributed.ProcessGroup | None = None, *, sender: int = 0, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors that another rank sends with :func:`send_weights`.

    A caller that stops early receives the others, too, so that the sender does not wait.

    Args:
        group: the group; None for the default group.
        sender: the sender's rank in the group.
        device: where the group's collectives take tensors.

    Raises:
        CommunicationError: another rank has failed, or does not come within the group's timeout.
    """
    received = _Channel(group, sender, device).received()
    try:
        for each in received:  # noqa: UP028 (a generator that is closed closes the one that it yields from)
            yield each
    except GeneratorExit:
        for _ in received:
            pass
        raise


class _Channel:
    """Broadcasts from one rank of a group. Descriptions are JSON, which runs no code of the sender."""

    def __init__(self, group: distributed.ProcessGroup | None, sender: int, device: torch.device | str) -> None:
        self.device, self._group, self._sender = torch.device(device), group, sender

    def describe(self, what: dict[str, Any] | None) -> None:
        """Send the description of a tensor, or None behind the last."""
        content = torch.tensor(list(json.dumps(what).encode()), dtype=torch.uint8, device=self.device)
        self.move(torch.tensor([len(content)], device=self.device))
        self.move(content)

    def received(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is sent."""
        while True:
            length = self.move(torch.empty(1, dtype=torch.int64, device=self.device))
            content = self.move(torch.empty(int(length), dtype=torch.uint8, device=self.device))
            what = json.loads(bytes(content.tolist()))
            if what is None:
                return
            dtype = getattr(torch, what["dtype"])
            yield what["name"], self.move(torch.empty(what["shape"], dtype=dtype, device=self.device))

    def move(self, tensor: Tensor) -> Tensor:
        """Broadcast a contiguous tensor, as bytes, since not every dtype of weights can be sent."""
        with explained("exchange weights", _LATE):
            if tensor.numel():
                distributed.broadcast(tensor.view(-1).view(torch.uint8), group=self._group, group_src=self._sender)
        return tensor
