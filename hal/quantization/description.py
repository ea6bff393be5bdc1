"""What a checkpoint says about its quantisation: which layers, by which scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hal.quantization.scheme import Scheme


class Quantization(ABC):
    """A checkpoint's quantisation, in one of the formats.

    Attributes:
        format: its name.
    """

    format: ClassVar[str]

    @abstractmethod
    def scheme(self, layer: str) -> Scheme | None:
        """How the layer of that name in the checkpoint is quantised; None if it is not.

        Raises:
            CheckpointError: it is quantised in a way that hal does not read, or nothing says how.
        """


class Writer(ABC):
    """Writes a format."""

    @abstractmethod
    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        """The JSON files that describe the checkpoint, by name; config.json is one.

        Args:
            config: config.json of the checkpoint that was quantised.
            scheme: of the layers.
            kept: linear layers that are not quantised.
            tensors: all tensors' names, and whether each belongs to a quantised layer.
        """
