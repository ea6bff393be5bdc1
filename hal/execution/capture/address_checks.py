"""The debug mode's check that whatever a graph reads or writes still lies where it lay at the capture."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from torch import Tensor

from hal.errors import GraphError
from hal.nn import CausalLM
from hal.step import Batch, StateMemory


class Addresses:
    """Where a model's weights and buffers, its states and a batch lie, by name.

    Args:
        model: its tensors are looked up anew at each check, so that a replaced one shows.
        states: likewise.
        batch: the fixed batch that graphs read.
    """

    def __init__(self, model: CausalLM, states: StateMemory, batch: Batch) -> None:
        self._model, self._states, self._batch = model, states, batch
        self._captured = {name: _place(tensor) for name, tensor in self._tensors()}

    def check(self) -> None:
        """Raise GraphError if a tensor was replaced by one that lies elsewhere, or has another shape or dtype."""
        found = {name: _place(tensor) for name, tensor in self._tensors()}
        moved = sorted(name for name in {*found, *self._captured} if found.get(name) != self._captured.get(name))
        if moved:
            shown = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
            raise GraphError(
                f"{shown} no longer lies where it lay at the capture, and the graphs would read the old memory",
                "write into the tensor with copy_() instead of replacing it, or make another Runner",
            )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()
        for name, tensor in self._states.tensors():
            yield f"state {name}", tensor
        for name, tensor in attrs.asdict(self._batch, recurse=False).items():
            yield f"batch.{name}", tensor


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, str(tensor.device)
