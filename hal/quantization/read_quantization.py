"""Finds and reads a checkpoint's quantization description, in any supported format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hal.config.untrusted_files import read_json
from hal.errors import CheckpointError, ConfigError
from hal.quantization.compressed_tensors import CompressedTensors
from hal.quantization.description import Quantization
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.modelslim import ModelSlim
from hal.quantization.scheme_registry import supported

KEYS = ("quantization_config", "quantize")
"""Keys of config.json about quantization, which models do not read."""


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of the checkpoint in ``folder`` with this config.json, or None.

    Raises:
        ConfigError: hal does not support the quantization.
        CheckpointError: the description is damaged.
    """
    section = config.get("quantization_config")
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"quantization_config in config.json is {section!r:.60}, not an object", AGAIN)
    descriptions = sorted(folder.glob(ModelSlim.PATTERN))
    if len(descriptions) > 1:
        raise CheckpointError(
            f"{folder} holds {len(descriptions)} quantization descriptions: "
            f"{', '.join(file.name for file in descriptions)}",
            "remove all but one",
        )
    if descriptions and section:
        raise CheckpointError(
            f"{folder} describes its quantization twice, in config.json and in {descriptions[0].name}",
            "remove one of the descriptions",
        )
    if descriptions:
        return ModelSlim.read(descriptions[0].name, read_json(descriptions[0]))
    if not section:
        return None
    method = section.get("quant_method")
    if method != CompressedTensors.format:
        named = "no quant_method" if method is None else f"the quant_method {method!r:.60}"
        raise ConfigError(
            f"quantization_config in config.json has {named}, which hal does not support",
            f"{supported()}; or use a checkpoint in float32, bfloat16 or float16",
        )
    return CompressedTensors.read(section)
