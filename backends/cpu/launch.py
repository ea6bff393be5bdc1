"""The recorded calls of a tape, and its memory plan: results with disjoint lifetimes share memory of a pool.

A result is alive from the launch that computes it to the last launch that reads it, or to the end if it is an output.
Results are placed largest first, each at the lowest offset that overlaps no live result (greedy by size, as in
Pisarchyk and Lee, *Efficient Memory Management for Deep Neural Net Inference*, 2020). A pool grows by adding a chunk,
so earlier tapes keep their addresses; no result spans two chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from hal.errors import GraphError


@attrs.define
class Launch:
    """One recorded call and the new tensors that it returned.

    Attributes:
        results: the returned tensors that share no memory with an argument.
        fills: whether the call writes ``results`` itself. Otherwise a replay copies the returned tensors there.
        copied: the index of each result among the returned tensors.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor] = attrs.Factory(list)
    fills: bool = False
    copied: tuple[int, ...] = ()

    def replayable(self) -> Callable[[], Any]:
        """Return the function that a replay calls."""
        call = partial(self.function, *self.args, **self.kwargs)
        return call if self.fills or not self.results else partial(_refill, call, self.copied, self.results)

    @property
    def line(self) -> str:
        """The name, with the shapes and dtypes of the tensors."""
        arguments = ", ".join(_described(value) for value in tree_iter((self.args, self.kwargs)))
        return f"{self.name}({arguments}) -> {', '.join(map(_described, self.results)) or 'in place'}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts, in order."""
    if isinstance(tree, Tensor):
        return [tree]  # as in each replay of most calls
    return [value for value in tree_iter(tree) if isinstance(value, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return a key for a tensor's storage; for a packed weight, whose storage torch hides, for the tensor itself."""
    return id(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


def _refill(call: Callable[[], Any], copied: tuple[int, ...], results: list[Tensor]) -> None:
    """Run a call that cannot write into given memory, and copy its results there."""
    made = tensors_of(call())
    for index, result in zip(copied, results, strict=True):
        if made[index].shape != result.shape:
            raise GraphError(
                f"{call} returned shape {list(made[index].shape)} in a replay and {list(result.shape)} in the capture",
                "make the shape independent of tensor values",
            )
        result.copy_(made[index])


ALIGNMENT = 64
"""Bytes of a cache line, which also suits vector loads."""


class Pool:
    """Memory that tapes share. If the largest tape is captured first, all others fit into its memory."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, torch.UntypedStorage]] = []
        self._held: dict[int, list[tuple[int, int]]] = {}

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return sum(chunk.nbytes() for _, chunk in self._chunks)

    @property
    def held(self) -> list[tuple[int, int]]:
        """The outputs that tapes hold, as offsets and sizes in bytes."""
        return [span for spans in self._held.values() for span in spans]

    @property
    def ends(self) -> list[int]:
        """The end offset of each chunk, ascending."""
        return [start + chunk.nbytes() for start, chunk in self._chunks]

    def reserve_outputs(self, owner: int, spans: list[tuple[int, int]]) -> None:
        """Reserve parts of the memory for an owner."""
        self._held[owner] = spans

    def release_outputs(self, owner: int) -> None:
        """Release the memory that :meth:`reserve_outputs` reserved for an owner."""
        self._held.pop(owner, None)

    def reserve(self, nbytes: int) -> None:
        """Grow the pool to at least ``nbytes``. Existing chunks keep their addresses."""
        if nbytes > self.nbytes or not self._chunks:
            self._chunks.append((self.nbytes, torch.UntypedStorage(nbytes - self.nbytes)))

    def at(self, offset: int) -> tuple[torch.UntypedStorage, int]:
        """Return the chunk that contains an offset, and the offset in the chunk."""
        start, chunk = next(each for each in reversed(self._chunks) if each[0] <= offset)
        return chunk, offset - start


@attrs.define
class _Life:
    nbytes: int
    first: int
    last: int
    offset: int = 0

    def meets(self, other: _Life) -> bool:
        return self.first <= other.last and other.first <= self.last


def place(launches: list[Launch], outputs: Any, pool: Pool, holder: int | None = None) -> Callable[[Tensor], Tensor]:
    """Plan the memory of all results of ``launches``; return a function that maps a tensor to its new place.

    Memory that the pool holds for other owners is not used. If ``holder`` is given, the outputs are held for it.
    Tensors that the launches did not allocate (weights, caches, inputs) are mapped to themselves. So are tensors that
    are referenced elsewhere, for example by a function that is captured in pieces and may read them later.
    """
    kept = _referenced_elsewhere(launches, outputs)
    lives: dict[int, _Life] = {}
    for index, launch in enumerate(launches):
        for result in launch.results:
            storage = result.untyped_storage()
            if storage_of(result) not in kept:
                lives.setdefault(storage_of(result), _Life(_aligned(storage.nbytes()), index, index))
        for tensor in tensors_of((launch.args, launch.kwargs)):
            if (life := lives.get(storage_of(tensor))) is not None:
                life.last = index
    for tensor in tensors_of(outputs):
        if (life := lives.get(storage_of(tensor))) is not None:
            life.last = len(launches)
    pool.reserve(_assign_offsets(lives.values(), pool.held, pool.ends, len(launches)))
    if holder is not None:
        given = {storage_of(tensor) for tensor in tensors_of(outputs)} & set(lives)
        pool.reserve_outputs(holder, [(lives[each].offset, lives[each].nbytes) for each in given])

    def moved(tensor: Tensor) -> Tensor:
        life = lives.get(storage_of(tensor))
        if life is None:
            return tensor
        chunk, start = pool.at(life.offset)
        offset = start // tensor.element_size() + tensor.storage_offset()
        return torch.empty(0, dtype=tensor.dtype).set_(chunk, offset, tensor.shape, tensor.stride())

    return moved


def _referenced_elsewhere(launches: list[Launch], outputs: Any) -> set[int]:
    """Return the storages allocated by launches that tensors other than theirs and the outputs refer to."""
    made = {storage_of(result) for launch in launches for result in launch.results}
    own: dict[int, tuple[Tensor, Tensor]] = {}

    def owned(tensor: Tensor) -> Tensor:
        if storage_of(tensor) not in made:
            return tensor
        if id(tensor) not in own:
            own[id(tensor)] = tensor, tensor.detach()
        return own[id(tensor)][1]

    # The launches get aliases of their tensors, so a storage with further uses is referenced elsewhere.
    for launch in launches:
        launch.args, launch.kwargs = tree_map_only(Tensor, owned, (launch.args, launch.kwargs))
        launch.results = [owned(result) for result in launch.results]
    known = {id(tensor): tensor for tensor in tensors_of(outputs)} | {id(each): each for _, each in own.values()}
    own.clear()
    count = Counter(storage_of(tensor) for tensor in known.values())
    one = torch.empty(1)
    extra = torch._C._storage_Use_Count(one.untyped_storage()._cdata) - 1
    return {
        storage_of(tensor)
        for tensor in known.values()
        if storage_of(tensor) in made
        and torch._C._storage_Use_Count(storage_of(tensor)) > count[storage_of(tensor)] + extra
    }


def _assign_offsets(lives: Iterable[_Life], held: Iterable[tuple[int, int]], ends: Iterable[int], last: int) -> int:
    """Set every offset, outside held memory and across no chunk's end; return the size of the plan in bytes."""
    placed = [_Life(nbytes, 0, last, offset) for offset, nbytes in held]
    walls = [_Life(0, 0, last, end) for end in ends]
    for life in sorted(lives, key=lambda each: -each.nbytes):
        met = [each for each in placed if each.meets(life)]
        for other in sorted((*met, *walls), key=lambda each: each.offset):
            if life.offset + life.nbytes <= other.offset:
                break
            life.offset = max(life.offset, other.offset + other.nbytes)
        placed.append(life)
    return max((life.offset + life.nbytes for life in placed), default=0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
