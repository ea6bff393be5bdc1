"""Batches of encoders: the inputs of one step, such as the patches of several images."""

from __future__ import annotations

from typing import Self

import attrs
import torch
from torch import Tensor

from hal.step.fields import Padding, field, fields_of, host_twin
from hal.step.host_copies import to_device


def padding_last(padding: Padding) -> Tensor:
    """Return starts in which padding tokens are a sequence behind the others."""
    return torch.full((padding.sizes["sequences"] + 1,), padding.sizes["tokens"], dtype=torch.int32)


@attrs.frozen(eq=False)
class EncoderBatch:
    """The tensors that an encoder reads in one step. An encoder declares a subclass with further fields.

    ``tokens`` counts what the encoder's layers map, such as patches, and ``sequences`` the parts within which they
    attend, such as frames.

    Attributes:
        query_start_loc: ``[sequences + 1]``, int32: the first token of each sequence, then ``tokens``.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
    """

    query_start_loc: Tensor = field("sequences+1", torch.int32, pad=padding_last)
    query_start_loc_host: Tensor = host_twin("query_start_loc")

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the order of the fields, contiguous and with the declared dtypes."""
        return [getattr(self, name).to(each.dtype).contiguous() for name, each in fields_of(type(self)).items()]

    def to(self, device: torch.device) -> Self:
        """Return this batch of the host on a device; see :func:`hal.step.to_device`. Host twins stay on the CPU."""
        fields = {name: each for name, each in fields_of(type(self)).items() if each.twin_of is None}
        return attrs.evolve(self, **{name: to_device(getattr(self, name), device) for name in fields})
