"""The interface of quantization formats, which describe the scheme of each layer of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hal.quantization.scheme import Scheme


class Quantization(ABC):
    """A checkpoint's quantization, in one of the formats.

    Attributes:
        format: the name of the format.
    """

    format: ClassVar[str]

    @abstractmethod
    def scheme(self, layer: str) -> Scheme | None:
        """Return the scheme of the checkpoint layer ``layer``, or None if it is not quantized.

        Raises:
            CheckpointError: hal does not support its quantization, or the description lacks the layer.
        """


class Writer(ABC):
    """Writes the description of a format."""

    @abstractmethod
    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        """Return the JSON files that describe the checkpoint, by name, including config.json.

        Args:
            config: config.json of the original checkpoint.
            scheme: the scheme of the quantized layers.
            kept: linear layers that are not quantized.
            tensors: whether each tensor belongs to a quantized layer, by name.
        """
