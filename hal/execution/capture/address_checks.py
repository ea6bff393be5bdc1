"""The debug mode's check that all tensors of a graph keep their addresses."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from hal.errors import GraphError
from hal.nn import CausalLM
from hal.step import Batch, StateMemory


class Addresses:
    """The addresses of a model's weights and buffers, its states and a batch, by name.

    Args:
        model: looked up again at each check, to find replaced tensors.
        states: looked up again at each check.
        batch: the fixed batch that graphs read.
    """

    def __init__(self, model: CausalLM, states: StateMemory, batch: Batch) -> None:
        self._model, self._states, self._batch = model, states, batch
        self._captured = {name: _place(tensor) for name, tensor in self._tensors()}

    def check(self) -> None:
        """Raise GraphError if the address, the shape or the dtype of a tensor has changed."""
        found = {name: _place(tensor) for name, tensor in self._tensors()}
        moved = sorted(name for name in {*found, *self._captured} if found.get(name) != self._captured.get(name))
        if moved:
            shown = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
            raise GraphError(
                f"{shown} has another address than at the capture, and the graphs would read the old memory",
                "write into the tensor with copy_() instead of replacing it, or create another Runner",
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        for name, tensor in self._states.tensors():
            yield f"state {name}", tensor
        for name, tensor in attrs.asdict(self._batch, recurse=False).items():
            yield f"batch.{name}", tensor


def _place(tensor: Tensor) -> tuple[object, ...]:
    # A weight in a layout of the backend's own has no address that torch shows. The graphs hold that tensor itself.
    address = tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)
    return address, tuple(tensor.shape), tensor.dtype, str(tensor.device)
