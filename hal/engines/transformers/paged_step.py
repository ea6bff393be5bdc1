"""What the layers of one step of continuous batching have in common."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Rows:
    """Where a step's tokens are, for all layers of one group of the cache.

    Attributes:
        written: ``[new]``, int32: the slots of the new tokens.
        table: ``[sequences, columns]``, int32: the blocks of each sequence.
        starts: ``[sequences + 1]``, int32: where the new tokens of each sequence start.
        lens: ``[sequences]``, int32: the length of each sequence with its new tokens.
        starts_host: ``starts``, on the host.
        lens_host: ``lens``, on the host.
    """

    written: Tensor
    table: Tensor
    starts: Tensor
    lens: Tensor
    starts_host: Tensor
    lens_host: Tensor

    @classmethod
    def of(cls, pages: Any, size: int, kwargs: dict[str, Any]) -> Rows:
        """Read the arguments of an attention function, with one copy to the host, which waits for the device.

        Args:
            pages: the allocator of the group.
            size: the number of tokens of a block.
            kwargs: the arguments of the attention function.
        """
        bounds = torch.stack((kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][pages.layer_type])).int()
        lens, bounds_host = bounds[1].diff(), bounds.cpu()
        starts_host, lens_host = bounds_host[0], bounds_host[1].diff()
        new, columns = int(starts_host[-1]), -(-int(lens_host.max()) // size)
        read, written = kwargs["read_index"][pages.index], kwargs["write_index"][pages.index][:new]
        slots = read if read.numel() else written  # With no token in the cache before, only the new ones are read.
        first = bounds[1, :-1, None] + torch.arange(columns, device=bounds.device) * size
        table = (slots[first.clamp(max=slots.shape[0] - 1).long()] // size).int()
        return cls(written.int(), table, bounds[0], lens, starts_host, lens_host)


class Step:
    """One call of the model. A call is a step even if its arguments are those of the call before.

    It travels among the arguments of the layers, so it ends with the call, and nested calls and threads share none.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, Rows] = {}

    def rows(self, pages: Any, size: int, kwargs: dict[str, Any]) -> Rows:
        """Return the rows of a group, which the first of its layers reads."""
        if (found := self._groups.get(pages)) is None:
            found = self._groups[pages] = Rows.of(pages, size, kwargs)
        return found
