"""Temporary memory for weights that a backend converts to another format."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from hal.drivers.backend import Backend


class WeightBuffers:
    """Allocates the tensors in which weights are assembled before a backend converts them.

    Successive weights reuse one buffer. Freeing each would fragment the heap.

    Args:
        dtype: the dtype of the weights.
        backend: converts them.
        sizes: the numbers of elements of the weights.
    """

    LARGEST = 32 << 20
    """In bytes. A larger weight gets separate memory, which is returned to the system as a whole."""

    def __init__(self, dtype: torch.dtype, backend: Backend, sizes: Iterable[int]) -> None:
        self._empty = partial(torch.empty, dtype=dtype, device=backend.device.torch)
        self._prepares = type(backend).prepare_weight is not Backend.prepare_weight
        self._elements = max((size for size in sizes if size * dtype.itemsize <= self.LARGEST), default=0)
        self._free: Tensor | None = None
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: torch.Size) -> Tensor:
        """Return memory for a weight of a shape."""
        if not self._prepares or shape.numel() > self._elements:
            return self._empty(shape)
        memory, self._free = self._free, None
        if memory is None:
            memory = self._empty(self._elements)
        self._taken[memory.data_ptr()] = memory
        return memory[: shape.numel()].view(shape)

    def replace(self, weight: Tensor, prepared: Tensor) -> Tensor:
        """Return the tensor to keep: ``prepared``, copied if it shares the memory of ``weight``."""
        memory = self._taken.pop(weight.data_ptr(), None)
        if memory is None:
            return prepared
        self._free = memory
        # A tensor that is not strided, such as oneDNN's packed weights, has no storage and is no view.
        shared = prepared.layout is torch.strided and (
            prepared.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        )
        return prepared.clone() if shared else prepared
