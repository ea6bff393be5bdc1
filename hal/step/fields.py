"""Declarations of batch fields: the axes, dtype, padding and host twin of each tensor of a step; the values of padding.

A batch class declares each tensor once::

    @attrs.frozen(eq=False)
    class MyBatch(Batch):
        rows_of_positions: Tensor = field("3 tokens", torch.int64, pad=0, default=lambda b: b.positions.expand(3, -1))

Static buffers, padding, chunked prefill, dynamic shapes in traces, and the checks of arguments and addresses use these
declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from hal.device.device import to_device
from hal.errors import BatchError, nearest

AXES = ("tokens", "sequences", "blocks")
"""The axes of a batch whose sizes vary between steps."""

_KEY = "hal.step"


@attrs.frozen
class FieldAxis:
    """One dimension of a field, of the size of the axis ``name`` plus ``extra``, or of the fixed size ``extra``."""

    name: str | None
    extra: int = 0

    def size(self, sizes: Mapping[str, Any]) -> Any:
        """Return the size of the dimension, given the sizes of the axes."""
        return self.extra if self.name is None else sizes[self.name] + self.extra


@attrs.frozen
class Padding:
    """The shape that a batch is padded to, for functions that compute padding.

    Attributes:
        sizes: the sizes of the axes.
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
        name: the attribute's name.
        axes: one for each dimension.
        dtype: the tensor's dtype.
        pad: the value of padding rows: a number, or a function that returns the whole tensor of a padding batch, on the
            CPU.
        by_shape: whether the shape of a padded step determines all values, given an equal number of queries per
            sequence. Such a field is written once, and never copied from a batch.
        twin_of: the field that this one is a CPU copy of; None for a field on the device.
        default: computes the field for a batch that was built without it; None if the field is required.
    """

    name: str
    axes: tuple[FieldAxis, ...]
    dtype: torch.dtype
    pad: Pad
    by_shape: bool
    twin_of: str | None
    default: Callable[[Any], Tensor] | None

    def shape(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the field's shape, given the sizes of the axes."""
        return tuple(axis.size(sizes) for axis in self.axes)

    def dim(self, name: str) -> int | None:
        """Return the dimension of an axis, or None if the field does not have it."""
        return next((dim for dim, axis in enumerate(self.axes) if axis.name == name), None)

    def padding(self, padding: Padding) -> Tensor:
        """Return the field's tensor for a batch of padding only, on the CPU.

        Raises:
            BatchError: ``pad`` returned a tensor of another shape.
        """
        shape = self.shape(padding.sizes)
        if not callable(self.pad):
            return torch.full(shape, self.pad, dtype=self.dtype)
        made = self.pad(padding)
        if tuple(made.shape) != shape:
            raise BatchError(
                f"the padding of the field {self.name} has the shape {list(made.shape)}, not {list(shape)}",
                f"make its `pad` return a tensor {self}",
            )
        return made.to(self.dtype)

    @property
    def only_tokens(self) -> bool:
        """Whether the number of tokens determines the shape, so that a graph can be captured per number of tokens."""
        return {axis.name for axis in self.axes} - {None} == {"tokens"}

    def __str__(self) -> str:
        return f"[{', '.join(map(_format_axis, self.axes))}]"


@attrs.frozen(eq=False)
class BatchBase:
    """Base of batches, whose attributes are declared with :func:`field` and :func:`host_twin`."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the order of the fields, contiguous and with the declared dtypes."""
        return [getattr(self, name).to(each.dtype).contiguous() for name, each in fields_of(type(self)).items()]

    def to(self, device: torch.device) -> Self:
        """Return this batch of the host on a device; see :func:`hal.step.to_device`. Host twins stay on the CPU."""
        fields = {name: each for name, each in fields_of(type(self)).items() if each.twin_of is None}
        return attrs.evolve(self, **{name: to_device(getattr(self, name), device) for name in fields})


def field(
    axes: str,
    dtype: torch.dtype,
    *,
    pad: Pad = 0,
    by_shape: bool = False,
    default: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Declare a tensor of a batch, on the device.

    Args:
        axes: one word for each dimension: ``tokens``, ``sequences`` or ``blocks`` (columns of the block table), each
            optionally with ``+n`` for ``n`` more elements; or a number, for a fixed size.
        dtype: the tensor's dtype.
        pad: the value of padding rows; see :class:`Field`.
        by_shape: see :class:`Field`.
        default: computes the tensor for a batch that was built without it.

    Raises:
        BatchError: an axis is unknown, or occurs twice.
    """
    parsed = tuple(_axis(word, axes) for word in axes.split())
    named = [axis.name for axis in parsed if axis.name is not None]
    if len(set(named)) < len(named):
        raise BatchError(f"a batch field has the axes {axes!r}, one of them twice", "use each axis once per field")
    metadata = {_KEY: (parsed, dtype, pad, by_shape, None, default)}
    return attrs.field(default=None, kw_only=True, metadata=metadata) if default else attrs.field(metadata=metadata)


def host_twin(name: str) -> Any:
    """Declare a CPU copy of the field ``name``, for kernels that read its values on the host."""
    return attrs.field(metadata={_KEY: (None, None, 0, False, name, None)})


@cache
def suffixed(name: str, group: int) -> str:
    """Return the name of a field of a cache group. Groups after the first have their number in it."""
    return f"{name}_{group}" if group else name


def fields_of(batch: type[Any]) -> Mapping[str, Field]:
    """Return the field declarations of a batch class, by name, in the order of its attributes.

    Raises:
        BatchError: an attribute is not declared with :func:`field` or :func:`host_twin`, or a twin's field is unknown.
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
                    f"{batch.__name__}.{name} is the host twin of {twin_of!r}, which is not a field on the device",
                    nearest(twin_of, declared),
                )
            axes, dtype, pad, by_shape, _, default = declared[twin_of]
        found[name] = Field(name, axes, dtype, pad, by_shape, twin_of, default)
    return found


def _axis(word: str, axes: str) -> FieldAxis:
    if word.isdecimal():
        return FieldAxis(None, int(word))
    name, _, extra = word.partition("+")
    if name not in AXES or not (extra.isdecimal() or (not extra and "+" not in word)):
        raise BatchError(
            f"a batch field has the axes {axes!r}, and {word!r} is not an axis of a batch",
            f"use {', '.join(AXES)}, one of these with +n, or a number",
        )
    return FieldAxis(name, int(extra or 0))


def _format_axis(axis: FieldAxis) -> str:
    if axis.name is None:
        return str(axis.extra)
    return f"{axis.name} + {axis.extra}" if axis.extra else axis.name


DUMMY_BLOCK = 0
"""The block that padding rows write to. No sequence may own it."""
DUMMY_SLOT = 0
"""The slot that padding rows write to. No sequence may own it."""


def dummy_slots(padding: Padding) -> Tensor:
    """Return the cache slots of padding tokens."""
    offsets = torch.arange(padding.sizes["tokens"], dtype=torch.int32) % padding.block_size
    return DUMMY_BLOCK * padding.block_size + offsets


def equal_starts(padding: Padding) -> Tensor:
    """Return ``query_start_loc`` of sequences with equally many queries."""
    return torch.arange(padding.sizes["sequences"] + 1, dtype=torch.int32) * padding.queries
