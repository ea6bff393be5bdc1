"""How batches are padded: to the size of a graph, in fixed memory, or by sequences of padding.

Graphs read a :class:`StaticBatch`, into which real batches are copied. Ranks that step together extend their batches by
the sequences of :func:`padding_batch`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from hal.step.batch import Batch
from hal.step.fields import DUMMY_BLOCK, Field, Padding, fields_of
from hal.step.shape import StepShape


class StaticBatch:
    """A padded batch at fixed addresses, of a model or of an encoder.

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
        batch_type: type[Any],
        shape: StepShape,
        *,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        length: int | None = None,
    ) -> None:
        self.shape = shape
        self._fields = fields_of(batch_type)
        self._sizes = {"tokens": shape.tokens, "sequences": shape.sequences, "blocks": max_blocks}
        self._block_size, self._device, self._length = block_size, device, length
        rows = self._rows()
        self.batch: Any = batch_type(**{name: self._placed(name, each) for name, each in rows.items()})
        self._keep_padding(rows)

    def first(self, shape: StepShape) -> Self:
        """Return a smaller batch that shares the memory of this one's first rows, where it writes its first values."""
        smaller = copy(self)
        smaller.shape = shape
        smaller._sizes = self._sizes | {"tokens": shape.tokens, "sequences": shape.sequences}
        rows = smaller._rows()
        tensors = {name: getattr(self.batch, name) for name in rows}
        for name, each in rows.items():
            for dim, size in enumerate(each.shape):
                tensors[name] = tensors[name].narrow(dim, 0, size)
            tensors[name].copy_(each)
        smaller.batch = type(self.batch)(**tensors)
        smaller._keep_padding(rows)
        return smaller

    def refusal(self, batch: Any) -> str | None:
        """Return why a batch with at most so many tokens and sequences does not fit; None if it does."""
        for name, each in self._tables.items():
            if getattr(batch, name).shape[1] > each.shape[1]:
                return f"its block table has more columns than the {each.shape[1]} captured"
        return None

    def fill(self, batch: Any) -> None:
        """Copy ``batch``, which fits, in, and reset the rows after it to padding."""
        for name, fixed in self._on_device.items():
            given = getattr(batch, name)
            if given.shape == fixed.shape:
                fixed.copy_(given)
            else:
                _copy_padded(fixed, given, self._fields[name], self._padding[name])

    def fill_tokens(self, batch: Any) -> None:
        """Copy in the fields whose shape the number of tokens determines, and reset the rows after them to padding."""
        for name, fixed in self.by_token.items():
            _copy_padded(fixed, getattr(batch, name), self._fields[name], self._padding[name])

    def host_values(self, batch: Any, names: Container[str] | None = None) -> dict[str, Tensor]:
        """Return the host values of ``batch`` padded to this size, by field name.

        Args:
            batch: the batch.
            names: those to return, such as those that a graph reads; None for all.
        """
        found = {}
        for name, fixed in self.twins.items():
            if names is not None and name not in names:
                continue
            given = fixed if self._fields[name].by_shape else getattr(batch, name)
            if given.shape != fixed.shape:
                given = _copy_padded(torch.empty_like(fixed), given, self._fields[name], self._padding[name])
            found[name] = given
        return found

    def _rows(self) -> dict[str, Tensor]:
        """Return the first values of each field, on the CPU: padding, but for lengths."""
        shape, length = self.shape, self._length
        padding = Padding(self._sizes, shape.queries, self._block_size)
        rows = {name: each.padding(padding) for name, each in self._fields.items()}
        for name in {"kv_lens", "kv_lens_host"} & rows.keys():
            rows[name][: 1 if length is None else None] = (shape.queries or 1) if length is None else length
        return rows

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to("cpu" if self._fields[name].twin_of else self._device, copy=True)

    def _keep_padding(self, rows: Mapping[str, Tensor]) -> None:
        fields = self._fields
        self._padding: dict[str, Any] = {
            name: self._placed(name, rows[name]) if callable(each.pad) else each.pad for name, each in fields.items()
        }
        tensors: dict[str, Tensor] = {name: getattr(self.batch, name) for name in fields}
        self.twins = {name: each for name, each in tensors.items() if fields[name].twin_of is not None}
        self._on_device = {
            name: each for name, each in tensors.items() if name not in self.twins and not fields[name].by_shape
        }
        self.by_token = {name: each for name, each in self._on_device.items() if fields[name].only_tokens}
        self._tables = {name: each for name, each in self._on_device.items() if fields[name].dim("blocks") == 1}


def _copy_padded(fixed: Tensor, given: Tensor, declared: Field, padding: int | float | Tensor) -> Tensor:
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
    return fixed


def padding_batch(
    batch_type: type[Batch],
    lengths: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
    cached: Sequence[int] | None = None,
) -> Batch:
    """Return a batch of padding only: sequences of token 0, which write to the dummy block.

    Unlike the padding rows of a :class:`StaticBatch`, they have their length, so that any kernel runs them.

    Args:
        batch_type: the class of the batch.
        lengths: the number of new tokens of each sequence, 1 or more.
        block_size: tokens per block of the cache.
        device: the device of all fields except host twins.
        cached: the number of tokens before the new ones of each sequence; None for 0.
    """
    starts = [0] * len(lengths) if cached is None else cached
    kv_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    ends = torch.tensor(lengths).cumsum(0)
    tokens = int(ends[-1])
    positions = torch.cat([torch.arange(*each) for each in zip(starts, kv_lens, strict=True)])
    sizes = {"tokens": tokens, "sequences": len(lengths), "blocks": -(-max(kv_lens) // block_size)}
    own = {
        "positions": positions,
        "slot_mapping": (DUMMY_BLOCK * block_size + positions % block_size).to(torch.int32),
        "block_table": torch.full((len(lengths), sizes["blocks"]), DUMMY_BLOCK, dtype=torch.int32),
        "query_start_loc": pad(ends, (1, 0)).to(torch.int32),
        "kv_lens": torch.tensor(kv_lens, dtype=torch.int32),
    }
    padding = Padding(sizes, lengths[0] if len(set(lengths)) == 1 else 0, block_size)
    made = {}
    for name, declared in fields_of(batch_type).items():
        tensor = own.get(declared.twin_of or name)
        tensor = declared.padding(padding) if tensor is None else tensor
        made[name] = tensor if declared.twin_of else tensor.to(device)
    return batch_type(**made)


def extended(batch: Batch, padding: Batch) -> Batch:
    """Return ``batch`` followed by the sequences of ``padding``, a batch of the same class."""
    shifts = {"query_start_loc": batch.num_tokens}
    return type(batch)(
        **{
            name: _joined(
                declared, getattr(batch, name), getattr(padding, name), shifts.get(declared.twin_of or name, 0)
            )
            for name, declared in fields_of(type(batch)).items()
        }
    )


def _joined(declared: Field, first: Tensor, second: Tensor, shift: int) -> Tensor:
    """Concatenate two tensors of a field along its tokens or sequences; ``shift`` is added to the second."""
    width = declared.dim("blocks")
    if width is not None:
        most = max(first.shape[width], second.shape[width])
        first, second = (_widened(each, width, most) for each in (first, second))
    for name in ("tokens", "sequences"):
        if (dim := declared.dim(name)) is not None:
            extra = declared.axes[dim].extra  # the elements before a second tensor's own, such as the first start
            own = second.narrow(dim, extra, second.shape[dim] - extra)
            return torch.cat([first, own + shift if shift else own], dim)
    return first


def _widened(table: Tensor, dim: int, width: int) -> Tensor:
    missing = width - table.shape[dim]
    if not missing:
        return table
    shape = [*table.shape[:dim], missing, *table.shape[dim + 1 :]]
    return torch.cat([table, table.new_full(shape, DUMMY_BLOCK)], dim)
