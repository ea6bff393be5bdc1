"""Declarations of batch fields: the axes, dtype, padding and host twin of each tensor of a step.

A batch class declares each tensor once::

    @attrs.frozen(eq=False)
    class MyBatch(Batch):
        rows_of_positions: Tensor = field("3 tokens", torch.int64, pad=0, default=lambda b: b.positions.expand(3, -1))

Static buffers, padding, chunks of a long prompt, traces with open sizes, and the checks of addresses and arguments
derive from the declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from hal.errors import BatchError, nearest

AXES = ("tokens", "sequences", "rows", "blocks")
"""The axes of a batch whose sizes change from step to step; ``rows`` are those of the logits."""

_KEY = "hal.step"


@attrs.frozen
class Axis:
    """One dimension of a field: ``name`` counts it, and it has ``extra`` elements more. A fixed size has no name."""

    name: str | None
    extra: int = 0

    def size(self, sizes: Mapping[str, Any]) -> Any:
        """The size of the dimension, where ``sizes`` has those of the axes."""
        return self.extra if self.name is None else sizes[self.name] + self.extra


@attrs.frozen
class Padding:
    """The shape that a batch is padded to, as paddings are computed from it.

    Attributes:
        sizes: of the axes.
        queries: new tokens of each sequence, if all have the same number; else 0.
        block_size: tokens per block of the cache.
    """

    sizes: Mapping[str, int]
    queries: int
    block_size: int


Pad = int | float | Callable[[Padding], Tensor]


@attrs.frozen
class Field:
    """The declaration of one tensor of a batch.

    Attributes:
        name: of the attribute.
        axes: one for each dimension.
        dtype: of the tensor.
        pad: what rows of padding hold: a number, or a function that gives the whole tensor of a batch of padding, on
            the CPU.
        by_shape: whether the shape of a padded step alone decides all values, as it does where each sequence has the
            same number of queries. Such a field is written once, and no batch is copied into it.
        twin_of: the field whose values this one holds on the CPU; None for a field on the device.
        default: computes the field from a batch that was built without it; None if it must be given.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: torch.dtype
    pad: Pad
    by_shape: bool
    twin_of: str | None
    default: Callable[[Any], Tensor] | None

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """The field's shape, where ``sizes`` has those of the axes."""
        return tuple(axis.size(sizes) for axis in self.axes)

    def dim(self, name: str) -> int | None:
        """The dimension that an axis counts, or None if none is."""
        return next((dim for dim, axis in enumerate(self.axes) if axis.name == name), None)

    @property
    def only_tokens(self) -> bool:
        """Whether tokens alone decide its shape, so that it can be captured for a number of tokens."""
        return {axis.name for axis in self.axes} - {None} == {"tokens"}

    def __str__(self) -> str:
        return f"[{', '.join(map(_shown, self.axes))}]"


def field(
    axes: str, dtype: torch.dtype, *, pad: Pad = 0, by_shape: bool = False,
    default: Callable[[Any], Tensor] | None = None,
) -> Any:  # fmt: skip
    """Declare a tensor of a batch, on the device.

    Args:
        axes: one word for each dimension: ``tokens``, ``sequences``, ``rows`` (of logits), ``blocks`` (columns of the
            block table), each with ``+n`` for ``n`` elements more; or a number, for a size that never changes.
        dtype: of the tensor.
        pad: what rows of padding hold; see :class:`Field`.
        by_shape: see :class:`Field`.
        default: computes the tensor from a batch that is built without it.

    Raises:
        BatchError: an axis is unknown, or occurs twice.
    """
    parsed = tuple(_axis(word, axes) for word in axes.split())
    named = [axis.name for axis in parsed if axis.name is not None]
    if len(set(named)) < len(named):
        raise BatchError(f"a batch field has the axes {axes!r}, one of them twice", "give each dimension its own axis")
    metadata = {_KEY: (parsed, dtype, pad, by_shape, None, default)}
    return attrs.field(default=None, kw_only=True, metadata=metadata) if default else attrs.field(metadata=metadata)


def host_twin(name: str) -> Any:
    """Declare the field that holds the values of the field ``name`` on the CPU, for kernels that read them there."""
    return attrs.field(metadata={_KEY: (None, None, 0, False, name, None)})


def fields_of(batch: type[Any]) -> Mapping[str, Field]:
    """The declarations of a batch class, by name, in the order of its attributes.

    Raises:
        BatchError: an attribute is not declared with :func:`field` or :func:`host_twin`, or a twin is of no field.
    """
    known = _known.get(batch)
    if known is None:
        known = _known[batch] = _read(batch)
    return known


_known: WeakKeyDictionary[type[Any], Mapping[str, Field]] = WeakKeyDictionary()


def _read(batch: type[Any]) -> Mapping[str, Field]:
    found: dict[str, Field] = {}
    declared = {each.name: each.metadata.get(_KEY) for each in attrs.fields(batch)}
    for name, facts in declared.items():
        if facts is None:
            raise BatchError(
                f"{batch.__name__}.{name} declares no axes", 'declare it: name: Tensor = field("tokens", torch.int64)'
            )
        axes, dtype, pad, by_shape, twin_of, default = facts
        if twin_of is not None:
            if declared.get(twin_of, (None,))[0] is None:
                raise BatchError(
                    f"{batch.__name__}.{name} is the host twin of {twin_of!r}, which is no field of the device",
                    nearest(twin_of, declared),
                )
            axes, dtype, pad, by_shape, _, default = declared[twin_of]
        found[name] = Field(name, axes, dtype, pad, by_shape, twin_of, default)
    return found


def _axis(word: str, axes: str) -> Axis:
    if word.isdecimal():
        return Axis(None, int(word))
    name, _, extra = word.partition("+")
    if name not in AXES or not (extra.isdecimal() or (not extra and "+" not in word)):
        raise BatchError(
            f"a batch field has the axes {axes!r}, and {word!r} is none of a batch's",
            f"use {', '.join(AXES)}, one of them with +n, or a number",
        )
    return Axis(name, int(extra or 0))


def _shown(axis: Axis) -> str:
    if axis.name is None:
        return str(axis.extra)
    return f"{axis.name} + {axis.extra}" if axis.extra else axis.name
