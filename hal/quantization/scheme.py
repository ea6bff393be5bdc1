"""The interface of quantization schemes: the tensors of a quantized weight, its layer, and how they are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from hal.errors import CheckpointError, ConfigError
from hal.nn import GroupedLinear, Linear
from hal.quantization.int8_arithmetic import Activation

Shapes = tuple[tuple[int, ...], ...]
INTEGERS = frozenset({"I8", "I32", "I64"})
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


@attrs.frozen
class TensorSpec:
    """The requirements of a tensor that accompanies a quantized weight.

    Attributes:
        shapes: the valid shapes.
        dtypes: the valid dtypes, in safetensors' names.
        required: whether the checkpoint must contain it.
    """

    shapes: Shapes
    dtypes: frozenset[str] = FLOATS
    required: bool = True

    @property
    def whole(self) -> bool:
        """Whether the tensor is one number for all rows of the weight."""
        return () in self.shapes

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """Return why a tensor of this shape and dtype is invalid, or None."""
        if shape not in self.shapes:
            return f"is {list(shape)}, not {list(self.shapes[0])}"
        return None if dtype in self.dtypes else f"is {dtype}, not {' or '.join(sorted(self.dtypes))}"


class Scheme(ABC):
    """A quantization scheme, registered in the entry-point group ``hal.quantization`` under its name.

    A scheme replaces linear layers with its layer, whose ``weights`` declare the checkpoint's tensors
    (:class:`hal.nn.Weight`). If that is enough, implement only :meth:`layer`. For values computed from several tensors,
    declare the tensors in :meth:`tensors`, validate them in :meth:`part`, and compute the values in :meth:`finish`.

    Attributes:
        name: the entry point's name.
        summary: a phrase that describes the computation, for errors.
        spellings: the scheme's representation, by format: a :class:`~hal.quantization.compressed_tensors.Group` for
            ``compressed-tensors``, the name of a type for ``modelslim``.
        writes: the formats that :meth:`write` supports, and ``hal quantize`` writes.
        calibrated: whether :meth:`write` needs an activation that was calibrated on text.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    spellings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    writes: ClassVar[frozenset[str]] = frozenset()
    calibrated: ClassVar[bool] = False

    @abstractmethod
    def layer(self, linear: Linear) -> nn.Module:
        """Return the layer that replaces a linear layer. Both are on the meta device."""

    def grouped_layer(self, linear: GroupedLinear) -> nn.Module:
        """Return the layer that replaces the projections of experts. Both are on the meta device.

        Raises:
            ConfigError: the scheme does not support experts, which is the default.
        """
        raise ConfigError(
            f"the scheme {self.name} does not quantize the projections of experts",
            "exclude them in the checkpoint's quantization config, or implement Scheme.grouped_layer",
        )

    def tensors(self, format: str, rows: int, bias: bool) -> Mapping[str, TensorSpec]:
        """Return the tensors beside a weight that no ``weights`` declare, by the last part of their name.

        Args:
            format: the checkpoint's format.
            rows: the number of rows of the weight.
            bias: whether the linear layer has a bias.

        Raises:
            ConfigError: the scheme does not read the format.
        """
        return {}

    def row_statistics(self, rows: Tensor) -> Tensor | None:
        """Return the statistics of the weight that :meth:`part` needs, or None.

        Args:
            rows: some rows of the weight. The results of consecutive calls are concatenated.
        """
        return None

    def part(self, format: str, name: str, tensors: Mapping[str, Tensor], statistics: Tensor | None) -> Any:
        """Validate a layer of the checkpoint, and return its data for :meth:`finish`.

        If ranks share whole experts, and :meth:`tensors` has numbers for all rows, such as the input scale, it is
        also called for the experts of other ranks. The tensors with an element per row are then empty.

        Args:
            format: the checkpoint's format.
            name: the layer's name in the checkpoint.
            tensors: the tensors of :meth:`tensors` in the checkpoint.
            statistics: the result of :meth:`row_statistics`.

        Raises:
            CheckpointError: a number is invalid.
        """
        return None

    def finish(self, layer: nn.Module, parts: Sequence[Any]) -> Mapping[str, Tensor | None]:
        """Return the contents of the layer's buffers without sources, on the CPU; none by default.

        Args:
            layer: the layer that :meth:`layer` returned.
            parts: the result of :meth:`part` for each checkpoint layer that the layer is computed from.
                The experts of other ranks come last.

        Raises:
            CheckpointError: the parts are incompatible.
        """
        return {}

    def activation(self, format: str, low: float, high: float, dtype: torch.dtype) -> Activation:
        """Return the quantization of inputs from ``low`` to ``high``, for a checkpoint of ``dtype``."""
        raise NotImplementedError

    def write(
        self,
        format: str,
        name: str,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
    ) -> dict[str, Tensor]:
        """Quantize a layer, and return its tensors by the last part of their name.

        Args:
            format: one of ``writes``.
            name: the weight's name in the checkpoint.
            weight: ``[rows, columns]``, floating.
            bias: ``[rows]``, floating, or None.
            activation: the quantization of the input, if ``calibrated``.
            dtype: the checkpoint's dtype.

        Raises:
            CheckpointError: a value is not finite.
        """
        raise NotImplementedError


def check_symmetric(name: str, what: str, values: Tensor | None) -> None:
    """Raise CheckpointError unless all ``values`` are 0, as for symmetrically quantized weights."""
    if values is not None and bool(values.double().ne(0).any()):
        raise CheckpointError(
            f"{name} has a {what} other than 0, so its weights are asymmetric", "quantize its weights symmetrically"
        )


def unknown_format(scheme: Scheme, format: str) -> ConfigError:
    """Return the error for a format that no branch of a scheme's method reads or writes."""
    return ConfigError(
        f"the quantization scheme {scheme.name} does not read or write the checkpoint format {format!r}",
        f"use {' or '.join(sorted(scheme.spellings))}, or add the format to {type(scheme).__module__}",
    )


def int8_row_sums(rows: Tensor) -> Tensor:
    """Return the sums of an int8 matrix's rows, int64. Sums a few rows at a time, because torch widens them first."""
    count = max(1, _SUMMED // max(1, rows.shape[1]))
    return torch.cat([part.sum(-1, dtype=torch.int64) for part in rows.split(count)])


_SUMMED = 1 << 15
"""Elements per sum: large temporaries would fragment the heap."""
