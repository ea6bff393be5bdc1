"""The tensors of a model's layers while they are filled, piece by piece, and prepared."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from hal.checkpoint.weight_bindings import Binding, Piece
from hal.checkpoint.weight_buffers import WeightBuffers
from hal.device.group import SOLO, Group
from hal.drivers.backend import Backend
from hal.nn import WeightUse

log = logging.getLogger("hal.checkpoint")


class Filling:
    """A tensor of a layer that is filled piece by piece."""

    def __init__(self, binding: Binding, computing: torch.dtype, backend: Backend, tied: AbstractSet[str]) -> None:
        # A layer that does not know of ranks computes with the whole weight.
        ranks: Group = getattr(backend.mesh, binding.weight.among) if hasattr(binding.module, "split") else SOLO
        self.pieces = binding.pieces(ranks.rank, ranks.size)
        self.shape = binding.local_shape(ranks.size)
        self._binding = binding
        self._zero = binding.weight.once and ranks.rank > 0
        self._computing, self._backend = computing, backend
        self.dtype = binding.dtype(computing)
        self.nbytes = self.shape.numel() * self.dtype.itemsize
        self._tied_use = binding.weight.tied_use if any(piece.source in tied for piece in self.pieces) else None
        self._left = sum(piece.numel for piece in self.pieces)
        self._tensor: Tensor | None = None

    def put(self, piece: Piece, start: int, values: Tensor, buffers: Mapping[torch.dtype, WeightBuffers]) -> bool:
        """Copy rows of a piece. Return whether this completes the tensor and the backend changes its format."""
        consumer = self._binding.weight.consumer
        if self._tensor is None:
            shape, device = self.shape, self._backend.device.torch
            if consumer is None:
                self._tensor = torch.empty(shape, dtype=self.dtype, device=device)
            else:
                self._tensor = buffers[self.dtype].take(shape)
        piece.put(self._tensor, start, values)
        self._left -= values.numel()
        if self._left:
            return False
        if self._zero:
            self._tensor.zero_()
        weight, self._tensor = self._tensor, None
        if consumer is None:
            self._binding.set(weight)
            return self._prepare_tied()
        use = WeightUse(consumer.operation, consumer.argument, self._computing)
        prepared = self._backend.prepare_weight(weight, use)
        self._binding.set(buffers[self.dtype].replace(weight, prepared))
        return self._prepare_tied() or prepared is not weight

    def _prepare_tied(self) -> bool:
        """Prepare a tied weight for its second use, as a copy. Return whether the backend changed its format."""
        binding, use = self._binding, self._tied_use
        if use is None:
            return False
        tensor = getattr(binding.module, binding.name).data
        told = WeightUse(use.consumer.operation, use.consumer.argument, self._computing, shared=True)
        prepared = self._backend.prepare_weight(tensor, told)
        if prepared is tensor:
            return False
        setattr(binding.module, use.attribute, prepared)
        log.info("%s is held twice, as it is and prepared for %s: %d MiB more", binding.full_name,
                 use.consumer.operation, prepared.numel() * prepared.element_size() >> 20)  # fmt: skip
        return True


def weight_buffers(filling: Sequence[Filling], backend: Backend, most: int) -> Mapping[torch.dtype, WeightBuffers]:
    """Return the buffers for weights of each dtype, of at most ``most`` bytes."""
    sizes: dict[torch.dtype, list[int]] = {}
    for each in filling:
        sizes.setdefault(each.dtype, []).append(each.shape.numel())
    return {dtype: WeightBuffers(dtype, backend, found, most) for dtype, found in sizes.items()}
