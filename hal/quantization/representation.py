"""The interface of representations: how a checkpoint format stores the layers of a quantization scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError
from hal.nn import QuantizedLinear, Weight
from hal.quantization.int8_arithmetic import AGAIN, Activation

Tensors = Mapping[str, Tensor | None]
"""Tensors by name. One that the checkpoint lacks is None."""


@attrs.frozen(eq=False)
class StoredLayer:
    """A layer whose tensors have been read, in the form that its checkpoint format stores.

    Attributes:
        layer: the model's layer, without values.
        names: the names of its parts in the checkpoint, expert by expert.
        tensors: this rank's tensors. Those that the layer declares with sources are on its device, others on the CPU.
        first_expert: the first of the experts that this rank holds.
    """

    layer: QuantizedLinear
    names: Sequence[str]
    tensors: Tensors
    first_expert: int = 0

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor that the checkpoint must have."""
        found = self.tensors[name]
        assert found is not None, name
        return found

    def part_of_row(self, row: int) -> str:
        """Return the name of the part that has a row of this rank, counted over all experts."""
        sizes, part = self.layer.stored_sizes, 0
        if len(self.names) == 1:  # of all experts
            return self.names[0]
        expert, row = divmod(row, sum(sizes))
        while row >= sizes[part]:
            row, part = row - sizes[part], part + 1
        return self.names[(self.first_expert + expert) * len(sizes) + part]

    def check_rows(self, valid: Tensor, problem: str) -> None:
        """Raise CheckpointError unless a condition holds for all rows.

        Args:
            valid: a bool per row, in any shape.
            problem: has ``{}`` in place of the name of the part.

        Raises:
            CheckpointError: see above.
        """
        if not bool(valid.all()):
            raise CheckpointError(problem.format(self.part_of_row(int(valid.flatten().int().argmin()))), AGAIN)


class Representation:
    """How a checkpoint format stores the layers of a scheme. A subclass overrides what differs.

    Args:
        description: what the format's description says of such a layer: a
            :class:`~hal.quantization.compressed_tensors.ConfigGroup` for ``compressed-tensors``, the name of a type for
            ``modelslim``.
    """

    def __init__(self, description: Any) -> None:
        self.description = description

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        """Return the tensors to read beside those that the layer declares, or in place of one of the same name.

        Declare them with :meth:`hal.nn.Projection.declare`, with a dtype, or with ``stored``.
        """
        return {}

    def decode(self, stored: StoredLayer) -> Tensors:
        """Return the tensors that the scheme takes, from those of this format. By default, they are the same.

        Raises:
            CheckpointError: a number is invalid.
        """
        return stored.tensors

    def activation(self, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return the quantization of inputs from ``low`` to ``high``, for a checkpoint of ``dtype``.

        A scheme that needs inputs of a calibration text to write a layer overrides it.
        """
        raise NotImplementedError

    def write(
        self,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        settings: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Quantize a layer, and return its tensors by the last part of their name. Without it, hal only reads.

        Args:
            name: the weight's name in the checkpoint.
            weight: ``[rows, columns]``, floating.
            bias: ``[rows]``, floating, or None.
            activation: the quantization of the input; None without :meth:`activation`.
            dtype: the checkpoint's dtype.
            settings: those of the scheme.

        Raises:
            CheckpointError: a value is not finite.
        """
        raise NotImplementedError

    def written_weight(self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], rows: slice) -> Tensor:
        """Return rows of the weight that the tensors of :meth:`write` mean, float32 ``[rows, columns]``.

        By default, those of numbers with a scale for each row.
        """
        return tensors["weight"][rows].float() * tensors["weight_scale"][rows].float()

    @property
    def writes(self) -> bool:
        """Whether ``hal quantize`` can write it."""
        return type(self).write is not Representation.write

    @property
    def calibrated(self) -> bool:
        """Whether :meth:`write` needs the quantization of the input."""
        return type(self).activation is not Representation.activation
