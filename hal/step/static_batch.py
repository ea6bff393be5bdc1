"""Batches at fixed addresses: graphs read them, and real batches are copied into them and padded."""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import copy
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from hal.errors import BatchError
from hal.step.batch import Batch
from hal.step.fields import Field, Padding, fields_of
from hal.step.shape import StepShape


class StaticBatch:
    """A padded batch at fixed addresses.

    Padding rows have length 0 and write to the dummy block. Initially all rows are padding, but the first sequence has
    a length: some kernels cannot be launched or captured if all lengths are 0.

    Args:
        batch_type: the class of the batches that are copied in.
        shape: the capacity.
        max_blocks: columns of the block table.
        block_size: tokens per block.
        device: the device of all fields except host twins.
        length: initial length of every sequence; by default the first has as many tokens as queries, the others 0.

    Attributes:
        shape: the capacity.
        batch: the tensors.
    """

    def __init__(
        self,
        batch_type: type[Batch],
        shape: StepShape,
        *,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        length: int | None = None,
    ) -> None:
        self.shape, self._block_size = shape, block_size
        self._fields = fields_of(batch_type)
        sizes = {"tokens": shape.tokens, "sequences": shape.sequences, "blocks": max_blocks}
        padding = Padding(sizes, shape.queries, block_size)
        whole = {name: each.padding(padding) for name, each in self._fields.items()}
        lens = whole["kv_lens"].clone()
        lens[: 1 if length is None else None] = (shape.queries or 1) if length is None else length
        first = {"kv_lens": lens, "kv_lens_host": lens.clone()}
        tensors = {
            name: (first.get(name, whole[name])).to("cpu" if each.twin_of else device, copy=True)
            for name, each in self._fields.items()
        }
        self.batch: Batch = batch_type(**tensors)
        self._by_token = [name for name, each in self._fields.items() if each.only_tokens and each.twin_of is None]
        self._twins = {name: each.twin_of for name, each in self._fields.items() if each.twin_of is not None}
        # The padding of each field: a number, or a tensor on the device.
        self._padding: dict[str, int | float | Tensor] = {
            name: whole[name].to(device) if callable(each.pad) else each.pad
            for name, each in self._fields.items()
            if each.twin_of is None and not each.by_shape
        }

    def first(self, shape: StepShape) -> Self:
        """Return a smaller batch that shares the memory of this one's first rows."""
        sizes = {"tokens": shape.tokens, "sequences": shape.sequences}

        def cut(each: Field, tensor: Tensor) -> Tensor:
            for dim, axis in enumerate(each.axes):
                if axis.name in sizes:
                    tensor = tensor.narrow(dim, 0, axis.size(sizes))
            return tensor

        smaller = copy(self)
        smaller.shape = shape
        smaller.batch = type(self.batch)(
            **{name: cut(each, getattr(self.batch, name)) for name, each in self._fields.items()}
        )
        smaller._padding = {
            name: cut(self._fields[name], each) if isinstance(each, Tensor) else each
            for name, each in self._padding.items()
        }
        return smaller

    def fill(self, batch: Batch) -> None:
        """Copy ``batch`` in, and reset the rows after it to padding.

        Raises:
            BatchError: the block table is wider than the fixed one.
        """
        columns, most = batch.block_table.shape[1], self.batch.block_table.shape[1]
        if columns > most:
            raise BatchError(
                f"the block table has {columns} columns; the graphs were captured for {most}",
                "give each sequence at most as many blocks as its maximum length needs",
            )
        for name, padding in self._padding.items():
            copy_padded(getattr(self.batch, name), getattr(batch, name), self._fields[name], padding)

    def fill_tokens(self, batch: Batch) -> None:
        """Copy in the fields whose shape the number of tokens determines, and reset the rows after them to padding."""
        for name in self._by_token:
            copy_padded(getattr(self.batch, name), getattr(batch, name), self._fields[name], self._padding[name])

    def host_values(self, batch: Batch, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Return the host values of ``batch`` padded to this size, by field name.

        Args:
            batch: the batch.
            names: those to return, such as those that a graph reads; None for all.
        """
        found = {}
        for name, twin_of in self._twins.items():
            if names is not None and name not in names:
                continue
            each, fixed = self._fields[name], getattr(self.batch, name)
            if each.by_shape:
                found[name] = fixed
                continue
            given = getattr(batch, name)
            if len(each.axes) == 1 and not callable(each.pad):
                missing = fixed.shape[0] - given.shape[0]
                found[name] = pad(given, (0, missing), value=each.pad) if missing else given
            else:
                found[name] = torch.empty_like(fixed)
                padding = self._padding[twin_of]
                copy_padded(found[name], given, each, padding.cpu() if isinstance(padding, Tensor) else padding)
        return found

    @property
    def by_token(self) -> Mapping[str, Tensor]:
        """The tensors whose shape the number of tokens determines."""
        return {name: getattr(self.batch, name) for name in self._by_token}


def copy_padded(fixed: Tensor, given: Tensor, declared: Field, padding: int | float | Tensor) -> None:
    """Copy a batch's tensor to the start of a fixed one, and fill the rest along tokens and sequences with padding."""
    here, rest = fixed, None
    for dim, axis in enumerate(declared.axes):
        size = given.shape[dim]
        if size == fixed.shape[dim]:
            continue
        if axis.name != "blocks":  # entries after a row's blocks are never read
            rest = dim
        here = here.narrow(dim, 0, size)
    here.copy_(given)
    if rest is not None:
        start, size = given.shape[rest], fixed.shape[rest] - given.shape[rest]
        behind = fixed.narrow(rest, start, size)
        if isinstance(padding, Tensor):
            behind.copy_(padding.narrow(rest, start, size))
        else:
            behind.fill_(padding)
