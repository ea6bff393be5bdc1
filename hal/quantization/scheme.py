"""What a quantisation scheme says: which tensors belong to a weight, what computes with them, and how they are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from hal.errors import CheckpointError
from hal.nn import Linear
from hal.quantization.int8_arithmetic import Activation

Shapes = tuple[tuple[int, ...], ...]
INTEGERS = frozenset({"I8", "I32", "I64"})
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


@attrs.frozen
class TensorSpec:
    """What a tensor beside a quantised weight may look like.

    Attributes:
        shapes: any of these.
        dtypes: any of these, as safetensors name them.
        required: whether the checkpoint must hold it.
    """

    shapes: Shapes
    dtypes: frozenset[str] = FLOATS
    required: bool = True

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """What is wrong with a tensor of this shape and dtype."""
        if shape not in self.shapes:
            return f"is {list(shape)}, not {list(self.shapes[0])}"
        return None if dtype in self.dtypes else f"is {dtype}, not {' or '.join(sorted(self.dtypes))}"


class Scheme(ABC):
    """A quantisation scheme. Registered in the entry-point group ``hal.quantization`` under its name.

    A scheme replaces linear layers by one of its own, whose ``weights`` bind what the checkpoint holds
    (:class:`hal.nn.Weight`). Where that says all, only :meth:`layer` is to be written. What has to be computed from
    several tensors is declared in :meth:`tensors`, checked by :meth:`part`, and put together by :meth:`finish`.

    Attributes:
        name: the entry point's.
        summary: what it computes, for errors, as a part of a sentence.
        spellings: by format, how a description says it: for ``compressed-tensors`` a
            :class:`~hal.quantization.compressed_tensors.Group`, for ``modelslim`` the name of a type.
        writes: the formats that :meth:`write` knows; ``hal quantize`` writes these.
        calibrated: whether :meth:`write` wants an activation that was found on a text.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    spellings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    writes: ClassVar[frozenset[str]] = frozenset()
    calibrated: ClassVar[bool] = False

    @abstractmethod
    def layer(self, linear: Linear) -> nn.Module:
        """Make the layer that takes a linear layer's place. Both are on the meta device."""

    def tensors(self, format: str, rows: int, bias: bool) -> Mapping[str, TensorSpec]:  # noqa: A002
        """Return what lies beside a weight and is bound by no ``weights``, by the last part of its name.

        Args:
            format: that the checkpoint has.
            rows: of the weight.
            bias: whether the linear layer has one.
        """
        return {}

    def row_statistics(self, rows: Tensor) -> Tensor | None:
        """Return what :meth:`part` needs of the weight's values, or None.

        Args:
            rows: some of the weight's rows, as they are read. What is returned for consecutive ones is concatenated.
        """
        return None

    def part(self, format: str, name: str, tensors: Mapping[str, Tensor], statistics: Tensor | None) -> Any:  # noqa: A002
        """Check a layer of the checkpoint, and return what :meth:`finish` takes of it.

        Args:
            format: that the checkpoint has.
            name: of the layer in the checkpoint.
            tensors: those of :meth:`tensors` that the checkpoint holds.
            statistics: what :meth:`row_statistics` returned.

        Raises:
            CheckpointError: a number is not one that it can be.
        """
        return None

    def finish(self, layer: nn.Module, parts: Sequence[Any]) -> Mapping[str, Tensor | None]:
        """Return what the layer's buffers without sources hold, on the CPU; by default it has none.

        Args:
            layer: that :meth:`layer` made.
            parts: of each layer of the checkpoint that it is computed from, what :meth:`part` returned.

        Raises:
            CheckpointError: the parts do not go together.
        """
        return {}

    def activation(self, format: str, low: float, high: float, dtype: torch.dtype) -> Activation:  # noqa: A002
        """Return how inputs from ``low`` to ``high`` are quantised, in a checkpoint of ``dtype``, if ``calibrated``."""
        raise NotImplementedError

    def write(
        self,
        format: str,  # noqa: A002
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Quantise a layer, and return its tensors by the last part of the name.

        Args:
            format: one of ``writes``.
            name: of the weight in the checkpoint.
            weight: ``[rows, columns]``, floating.
            bias: ``[rows]``, floating, or None.
            activation: of the input, if ``calibrated``.
            dtype: of the checkpoint.

        Raises:
            CheckpointError: a value is not finite.
        """
        raise NotImplementedError


def zeros(name: str, what: str, values: Tensor | None) -> None:
    """Refuse weights that are quantised asymmetrically: ``values`` must all be 0.

    Raises:
        CheckpointError: they are not.
    """
    if values is not None and bool(values.double().ne(0).any()):
        raise CheckpointError(
            f"{name} has a {what} other than 0: its weights are asymmetric", "quantise its weights symmetrically"
        )


def int8_row_sums(rows: Tensor) -> Tensor:
    """Return the sums of an int8 matrix's rows, int64. torch widens what it sums: a few rows are summed at a time."""
    count = max(1, _SUMMED // max(1, rows.shape[1]))
    return torch.cat([part.sum(-1, dtype=torch.int64) for part in rows.split(count)])


_SUMMED = 1 << 15
"""Elements at a time: large temporaries would leave holes in the heap."""
