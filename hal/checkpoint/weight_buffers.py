"""Memory that weights are assembled in, before a backend brings them into a form of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal.drivers.backend import Backend


class WeightBuffers:
    """Where a weight is assembled for a backend that will bring it into another form.

    One piece of memory serves one weight after the other. Giving each back to the heap would leave holes in it.
    """

    LARGEST = 32 << 20
    """Bytes. A larger weight gets memory of its own, which goes back to the system as a whole."""

    def __init__(self, dtype: torch.dtype, backend: Backend) -> None:
        self._empty = partial(torch.empty, dtype=dtype, device=backend.device.torch)
        self._prepares = type(backend).prepare_weight is not Backend.prepare_weight
        self._free: Tensor | None = None
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: torch.Size) -> Tensor:
        """Memory for a weight of that shape."""
        if not self._prepares or shape.numel() * self._empty(0).element_size() > self.LARGEST:
            return self._empty(shape)
        memory, self._free = self._free, None
        if memory is None:
            memory = self._empty(self.LARGEST // self._empty(0).element_size())
        self._taken[memory.data_ptr()] = memory
        return memory[: shape.numel()].view(shape)

    def replace(self, weight: Tensor, prepared: Tensor) -> Tensor:
        """What stays: ``prepared``, in memory of its own if it is ``weight`` itself or a view of it."""
        memory = self._taken.pop(weight.data_ptr(), None)
        if memory is None:
            return prepared
        self._free = memory
        # What is not strided, as oneDNN's packed weights are, has no storage, and is no view.
        shared = prepared.layout is torch.strided and (
            prepared.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        )
        return prepared.clone() if shared else prepared
