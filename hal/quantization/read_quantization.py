"""Find and read a checkpoint's description of its quantisation, in any of the formats."""

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
"""What config.json may say about quantisation, and models do not read."""


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """What the checkpoint in ``folder``, with this config.json, says about its quantisation; None if nothing.

    Raises:
        ConfigError: it is quantised in a way that hal does not read.
        CheckpointError: its description is damaged.
    """
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
