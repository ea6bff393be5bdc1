"""Temporary memory for weights that a backend converts to another format."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hal.drivers.backend import Backend


class WeightBuffers:
    """Allocates the tensors in which weights are assembled before a backend converts them.

    Successive weights of a dtype reuse one buffer.

    Args:
        backend: converts them.
        sizes: the numbers of elements of the weights, by dtype.
        most: the bytes of a large weight. Larger ones get separate memory, which they give back.
    """

    def __init__(self, backend: Backend, sizes: Mapping[torch.dtype, Iterable[int]], most: int) -> None:
        self._device = backend.device.torch
        self._prepares = type(backend).prepare_weights is not Backend.prepare_weights
        self._elements = {
            dtype: max((size for size in each if size * dtype.itemsize <= most), default=0)
            for dtype, each in sizes.items()
        }
        self._free: dict[torch.dtype, Tensor] = {}
        self._taken: dict[int, Tensor] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a weight."""
        if not self._prepares or shape.numel() > self._elements[dtype]:
            return self._allocated(shape, dtype)
        memory = self._free.pop(dtype, None)
        if memory is None:
            memory = self._allocated(torch.Size([self._elements[dtype]]), dtype)
        self._taken[memory.data_ptr()] = memory
        return memory[: shape.numel()].view(shape)

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor to keep: the given one, copied if it shares the memory of a weight that was taken."""
        # A tensor that is not strided, such as oneDNN's packed weights, has no storage and is no view.
        if not self._taken or tensor.layout is not torch.strided:
            return tensor
        place = tensor.untyped_storage().data_ptr()
        shared = any(memory.untyped_storage().data_ptr() == place for memory in self._taken.values())
        return tensor.clone() if shared else tensor

    def give_back(self, weight: Tensor) -> None:
        """Reuse a weight's memory for the next one, if :meth:`take` returned it from a buffer."""
        memory = self._taken.pop(weight.data_ptr(), None)
        if memory is not None:
            self._free[memory.dtype] = memory

    def _allocated(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        nbytes = shape.numel() * dtype.itemsize
        if not self._prepares or self._device.type != "cpu" or not nbytes:
            return torch.empty(shape, dtype=dtype, device=self._device)
        # The C library would keep freed memory, and not always reuse it for a weight of the same size.
        memory = mmap.mmap(-1, nbytes, access=mmap.ACCESS_COPY)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
