"""Temporary memory for weights that a backend converts to another format."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from hal.drivers.backend import Backend


class WeightBuffers:
    """Allocates the tensors in which weights are assembled before a backend converts them.

    Successive weights reuse one buffer.

    Args:
        dtype: the dtype of the weights.
        backend: converts them.
        sizes: the numbers of elements of the weights.
        most: the bytes of a large weight. Larger ones get separate memory, which they give back.
    """

    def __init__(self, dtype: torch.dtype, backend: Backend, sizes: Iterable[int], most: int) -> None:
        self._dtype, self._device = dtype, backend.device.torch
        self._prepares = type(backend).prepare_weight is not Backend.prepare_weight
        self._elements = max((size for size in sizes if size * dtype.itemsize <= most), default=0)
        self._free: Tensor | None = None
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: torch.Size) -> Tensor:
        """Return memory for a weight of a shape."""
        if not self._prepares or shape.numel() > self._elements:
            return self._allocated(shape)
        memory, self._free = self._free, None
        if memory is None:
            memory = self._allocated(torch.Size([self._elements]))
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

    def _allocated(self, shape: torch.Size) -> Tensor:
        nbytes = shape.numel() * self._dtype.itemsize
        if not self._prepares or self._device.type != "cpu" or not nbytes:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        # The C library would keep freed memory, and not always reuse it for a weight of the same size.
        memory = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.uint8).view(self._dtype).view(shape)
