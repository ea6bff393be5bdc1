"""Batches of encoders: the inputs of one step, such as the patches of several images."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from hal.step.fields import BatchBase, Padding, field, host_twin
from hal.step.shape import StepShape


def padding_last(padding: Padding) -> Tensor:
    """Return starts in which padding tokens are one sequence, behind those of a batch."""
    starts = torch.full((padding.sizes["sequences"] + 1,), padding.sizes["tokens"], dtype=torch.int32)
    starts[0] = 0
    return starts


@attrs.frozen(eq=False)
class EncoderBatch(BatchBase):
    """The tensors that an encoder reads in one step. An encoder declares a subclass with further fields.

    ``tokens`` counts what the encoder's layers map, such as patches, and ``sequences`` the parts within which they
    attend, such as frames.

    Attributes:
        query_start_loc: ``[sequences + 1]``, int32: the first token of each sequence, then ``tokens``.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
    """

    query_start_loc: Tensor = field("sequences+1", torch.int32, pad=padding_last)
    query_start_loc_host: Tensor = host_twin("query_start_loc")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, from the host twin."""
        return int(self.query_start_loc_host[-1])

    @property
    def shape(self) -> StepShape:
        """The shape of the step."""
        return StepShape(self.num_tokens, self.query_start_loc_host.shape[0] - 1, 0)
