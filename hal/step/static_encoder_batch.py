"""Encoder batches at fixed addresses, which graphs read."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.step.encoder_batch import EncoderBatch
from hal.step.fields import Padding, fields_of
from hal.step.static_batch import copy_padded


class StaticEncoderBatch:
    """A padded batch of an encoder at fixed addresses.

    Padding tokens are a sequence behind the others, and further sequences are empty.

    Args:
        batch_type: the class of the batches that are copied in.
        tokens: the capacity in tokens.
        sequences: the capacity in sequences, at least 2.
        device: the device of all fields except host twins.

    Attributes:
        batch: the tensors. Initially all tokens are one sequence.
    """

    def __init__(self, batch_type: type[EncoderBatch], tokens: int, sequences: int, device: torch.device) -> None:
        self._fields = fields_of(batch_type)
        self._sizes = {"tokens": tokens, "sequences": sequences}
        padding = Padding(self._sizes, 0, 0)
        self._padding = {name: each.padding(padding) for name, each in self._fields.items()}
        tensors = {}
        for name, each in self._fields.items():
            made = self._padding[name].clone()
            if any(axis.name == "sequences" and axis.extra for axis in each.axes):
                made[0] = 0  # the start of the first sequence
            tensors[name] = made.to("cpu" if each.twin_of else device)
        self._on_device = {name: each.to(device) for name, each in self._padding.items()}
        self.batch: EncoderBatch = batch_type(**tensors)

    @property
    def twins(self) -> dict[str, Tensor]:
        """The tensors on the host, by field."""
        return {name: getattr(self.batch, name) for name, each in self._fields.items() if each.twin_of is not None}

    def holds(self, batch: EncoderBatch) -> bool:
        """Return whether a batch fits. Tokens of padding need a sequence behind those of the batch."""
        tokens, sequences = batch.num_tokens, len(batch.query_start_loc_host) - 1
        missing = self._sizes["tokens"] - tokens
        room = self._sizes["sequences"] - sequences
        return missing >= 0 and room >= (1 if missing else 0)

    def fill(self, batch: EncoderBatch) -> None:
        """Copy a batch that fits in, and pad it, except for the host twins."""
        for name, each in self._fields.items():
            if each.twin_of is None:
                copy_padded(getattr(self.batch, name), getattr(batch, name), each, self._on_device[name])

    def host_values(self, batch: EncoderBatch) -> dict[str, Tensor]:
        """Return the host twins of a batch, padded, by field."""
        found = {}
        for name, fixed in self.twins.items():
            found[name] = torch.empty_like(fixed)
            copy_padded(found[name], getattr(batch, name), self._fields[name], self._padding[name])
        return found
