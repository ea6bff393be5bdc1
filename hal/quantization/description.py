"""What a checkpoint says about its quantisation: which layers, by which scheme."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hal.config.untrusted_files import read_json
from hal.errors import CheckpointError, ConfigError
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.scheme import Scheme
from hal.quantization.scheme_registry import supported

KEYS = ("quantization_config", "quantize")
"""What config.json may say about quantisation, and models do not read."""


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


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """What the checkpoint in ``folder``, with this config.json, says about its quantisation; None if nothing.

    Raises:
        ConfigError: it is quantised in a way that hal does not read.
        CheckpointError: its description is damaged.
    """
    from hal.quantization.compressed_tensors import CompressedTensors
    from hal.quantization.modelslim import ModelSlim

    section = config.get("quantization_config")
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"quantization_config in config.json is {section!r:.60}, no table", AGAIN)
    descriptions = sorted(folder.glob(ModelSlim.PATTERN))
    if len(descriptions) > 1:
        raise CheckpointError(
            f"{folder} holds {len(descriptions)} quantisation descriptions: "
            f"{', '.join(file.name for file in descriptions)}",
            "remove those that are not meant",
        )
    if descriptions and section:
        raise CheckpointError(
            f"{folder} describes its quantisation twice, in config.json and in {descriptions[0].name}",
            "remove the one that is not meant",
        )
    if descriptions:
        return ModelSlim.read(descriptions[0].name, read_json(descriptions[0]))
    if not section:
        return None
    method = section.get("quant_method")
    if method != CompressedTensors.format:
        named = "without naming a quant_method" if method is None else f"by the method {method!r:.60}"
        raise ConfigError(
            f"config.json says the weights are quantised, {named}",
            f"{supported()}; or use a checkpoint in float32, bfloat16 or float16",
        )
    return CompressedTensors.read(section)
