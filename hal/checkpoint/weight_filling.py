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
        ranks: Group = getattr(backend.mesh, binding.weight.group) if hasattr(binding.module, "split") else SOLO
        self.pieces = binding.pieces(ranks.rank, ranks.size)
        self.shape = binding.local_shape(ranks.size)
        self.module = binding.module
        self._binding = binding
        self._zero = binding.weight.first_rank_only and ranks.rank > 0
        self._computing, self._backend = computing, backend
        self.dtype = binding.dtype(computing)
        self.nbytes = self.shape.numel() * self.dtype.itemsize
        self._tied_use = binding.weight.tied_use if any(piece.source in tied for piece in self.pieces) else None
        self._left = sum(piece.numel for piece in self.pieces)
        self._tensor: Tensor | None = None

    def put(self, piece: Piece, start: int, values: Tensor, buffers: Mapping[torch.dtype, WeightBuffers]) -> bool:
        """Copy rows of a piece. Return whether this completes the tensor and the backend changes its format."""
        if self._tensor is None:
            if self._binding.weight.consumer is None:
                self._tensor = self._allocated()
            else:
                self._tensor = buffers[self.dtype].take(self.shape)
        return self._copy(piece, start, values) and self._keep(buffers)

    def _allocated(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self._backend.device.torch)

    def _copy(self, piece: Piece, start: int, values: Tensor) -> bool:
        """Copy rows of a piece into memory that is allocated. Return whether this completes the tensor."""
        assert self._tensor is not None
        piece.put(self._tensor, start, values)
        self._left -= values.numel()
        if self._left:
            return False
        if offset := self._binding.weight.offset:
            self._tensor += offset
        if self._zero:
            self._tensor.zero_()
        return True

    def _keep(self, buffers: Mapping[torch.dtype, WeightBuffers]) -> bool:
        """Make the tensor the layer's. Return whether the backend changes its format."""
        weight, self._tensor = self._tensor, None
        assert weight is not None
        consumer = self._binding.weight.consumer
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
        log.info(
            "%s is held twice, as it is and prepared for %s: %d MiB more",
            binding.full_name,
            use.consumer.operation,
            prepared.numel() * prepared.element_size() >> 20,
        )
        return True


class Refilling(Filling):
    """A tensor of a layer that is filled again, in the memory that it has."""

    def put_again(self, piece: Piece, values: Tensor) -> None:
        """Copy a piece. The last one completes the tensor, and writes it into the layer's."""
        binding, consumer = self._binding, self._binding.weight.consumer
        held = getattr(binding.module, binding.name)
        if self._tensor is None:
            self._tensor = held if consumer is None else self._allocated()
        if not self._copy(piece, 0, values):
            return
        weight, self._tensor = self._tensor, None
        if consumer is not None:
            self._backend.replace_weight(
                held, weight, WeightUse(consumer.operation, consumer.argument, self._computing)
            )
        tied = self._tied_use
        if tied is not None and (prepared := getattr(binding.module, tied.attribute)) is not None:
            use = WeightUse(tied.consumer.operation, tied.consumer.argument, self._computing, shared=True)
            self._backend.replace_weight(prepared, held, use)


def weight_buffers(filling: Sequence[Filling], backend: Backend, most: int) -> Mapping[torch.dtype, WeightBuffers]:
    """Return the buffers for weights of each dtype, of at most ``most`` bytes."""
    sizes: dict[torch.dtype, list[int]] = {}
    for each in filling:
        sizes.setdefault(each.dtype, []).append(each.shape.numel())
    return {dtype: WeightBuffers(dtype, backend, found, most) for dtype, found in sizes.items()}
