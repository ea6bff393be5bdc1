"""Masks of transformers: what each says, in the words of hal's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hal.sources.transformers.phase import PHASE


@attrs.frozen
class Mask:
    """What a mask says, or why hal cannot apply it.

    Attributes:
        window: see :class:`hal.ops.AttentionOptions`.
        causal: likewise.
        chunk: likewise.
        problem: why hal cannot apply it, or None.
    """

    window: int | None = None
    causal: bool = True
    chunk: int | None = None
    problem: str | None = None


class SeenMask(Tensor):
    """What layers get in place of a mask while a model is probed: a tensor without values, with what the mask says."""

    says: Mask

    @classmethod
    def of(cls, says: Mask, shape: tuple[Any, ...], dtype: torch.dtype) -> SeenMask:
        """Return a mask of a shape."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(SeenMask)
        made.says = says
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented  # Scores know what a mask does to them.
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor):
            return found
        says = next(each.says for each in args if isinstance(each, SeenMask))
        if any(isinstance(each, Tensor) and each.dim() and not isinstance(each, SeenMask) for each in args):
            says = Mask(problem="a mask that the class combines with other tensors")
        made = found.as_subclass(SeenMask)
        made.says = says
        return made


class Zeros(TorchFunctionMode):
    """Notes which tensors without values are made of zeros, so that a mask can be read that depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self._reads = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._reads:
            args, kwargs = tree_map(self._on_host, (args, kwargs))
        found = func(*args, **(kwargs or {}))
        if func in (torch.zeros, torch.zeros_like):
            self.made.append(found)
        return found

    def _on_host(self, value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value in self else value

    def __contains__(self, value: Any) -> bool:
        return any(value is each for each in self.made)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Give the known zeros values in the block."""
        self._reads = True
        try:
            yield
        finally:
            self._reads = False


def mask(
    *,
    mask_function: Any,
    batch_size: Any = 1,
    q_length: Any = 1,
    kv_length: Any = 1,
    dtype: torch.dtype = torch.float32,
    local_size: int | None = None,
    **others: Any,
) -> Any:
    """Return what a layer gets as its mask; the function for ``AttentionMaskInterface``.

    While a model is probed, it is what the mask function says. In a step, the probe has read it. Attention that a class
    computes itself adds zeros there.
    """
    phase = PHASE.get()
    zeros = getattr(phase, "zeros", None)
    if zeros is not None:
        return SeenMask.of(_read(mask_function, local_size, zeros), (batch_size, 1, q_length, kv_length), dtype)
    if getattr(phase, "store", None) is None:
        return Mask()
    return torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=others.get("device"))


def _read(mask_function: Any, local_size: int | None, zeros: Zeros) -> Mask:
    """Return what a mask function says, by a comparison with masks that hal has, near multiples of a size."""
    near = {max(0, turn * (local_size or 9) + offset) for turn in range(4) for offset in range(-3, 4)}
    points = torch.tensor(sorted(near), device="cpu")
    query, key = points[:, None], points[None]
    first = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    try:
        with zeros.reading():
            seen = mask_function(first, first, query, key)
            seen = torch.as_tensor(seen, device="cpu").expand(len(near), len(near))
    except Exception as error:  # It may read tensors of the step, such as the segments of packed sequences.
        return Mask(problem=f"a mask that depends on the batch ({type(error).__name__})")
    return mask_of(seen, query, key, local_size)


def mask_of(seen: Tensor, query: Tensor, key: Tensor, size: int | None) -> Mask:
    """Return the mask that lets queries attend to the keys that they see.

    Args:
        seen: ``[queries, keys]``, bool.
        query: the positions of the queries, ``[queries, 1]``.
        key: the positions of the keys, ``[1, keys]``.
        size: the window or chunk that it may have.
    """
    causal = key <= query
    if torch.equal(seen, causal):
        return Mask()
    if size and torch.equal(seen, causal & (key > query - size)):
        return Mask(window=size)
    if size and torch.equal(seen, (query - key).abs() < size):
        return Mask(window=size, causal=False)
    if size and torch.equal(seen, causal & (key // size == query // size)):
        return Mask(chunk=size)
    if seen.all():
        return Mask(causal=False)
    return Mask(problem="another mask than a causal one, with or without a window or chunks")
