"""Where the results of a tape live: one arena, in which results that are never alive together share memory.

A result is alive from the launch that makes it to the last launch that reads it, or to the end if it is an output. Each
is placed at the lowest offset where it meets no other that is alive with it, the largest first (greedy by size, as in
Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from .tape import Launch

ALIGNMENT = 64
"""Bytes: a cache line, and what vector loads like."""


class Pool:
    """Memory that tapes share. Captured largest first, all tapes fit into what the first one took."""

    def __init__(self) -> None:
        self._arena = torch.UntypedStorage(0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._arena.nbytes()

    def reserve(self, nbytes: int) -> torch.UntypedStorage:
        """An arena of at least ``nbytes``. Growing makes a new one; earlier tapes keep theirs."""
        if nbytes > self._arena.nbytes():
            self._arena = torch.UntypedStorage(nbytes)
        return self._arena


@attrs.define
class _Life:
    nbytes: int
    first: int
    last: int
    offset: int = 0

    def meets(self, other: _Life) -> bool:
        return self.first <= other.last and other.first <= self.last


def storage_of(tensor: Tensor) -> int:
    """Names the memory under a tensor. A packed weight has none that torch would show, and stands for itself."""
    return id(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


def place(launches: list[Launch], outputs: Any, pool: Pool) -> Callable[[Tensor], Tensor]:
    """Plan the memory of everything that ``launches`` make; return a function from each tensor to its place in it.

    Tensors whose memory the launches did not make (weights, caches, inputs) are returned as they are.
    """
    lives: dict[int, _Life] = {}
    for index, launch in enumerate(launches):
        for result in launch.results:
            storage = result.untyped_storage()
            lives.setdefault(storage_of(result), _Life(_aligned(storage.nbytes()), index, index))
        for tensor in _tensors((launch.args, launch.kwargs)):
            if (life := lives.get(storage_of(tensor))) is not None:
                life.last = index
    for tensor in _tensors(outputs):
        if (life := lives.get(storage_of(tensor))) is not None:
            life.last = len(launches)
    arena = pool.reserve(_assign_offsets(lives.values()))

    def moved(tensor: Tensor) -> Tensor:
        life = lives.get(storage_of(tensor))
        if life is None:
            return tensor
        offset = life.offset // tensor.element_size() + tensor.storage_offset()
        return torch.empty(0, dtype=tensor.dtype).set_(arena, offset, tensor.shape, tensor.stride())

    return moved


def _assign_offsets(lives: Iterable[_Life]) -> int:
    """Set every offset; return the bytes that all take together."""
    placed: list[_Life] = []
    for life in sorted(lives, key=lambda each: -each.nbytes):
        for other in sorted((each for each in placed if each.meets(life)), key=lambda each: each.offset):
            if life.offset + life.nbytes <= other.offset:
                break
            life.offset = max(life.offset, other.offset + other.nbytes)
        placed.append(life)
    return max((life.offset + life.nbytes for life in placed), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (value for value in tree_iter(tree) if isinstance(value, Tensor))
