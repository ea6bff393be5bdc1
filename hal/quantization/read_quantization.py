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

SECTION, OLDER = "quantization_config", "compression_config"
KEYS = (SECTION, OLDER, "quantize")
"""Keys of config.json about quantization, which models do not read. The first versions of compressed-tensors wrote the
second one in place of the first."""


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of the checkpoint in ``folder`` with this config.json, or None.

    Raises:
        ConfigError: hal does not support the quantization.
        CheckpointError: the description is damaged.
    """
    key = SECTION if config.get(SECTION) or not config.get(OLDER) else OLDER
    section, other = config.get(key), config.get(OLDER)
    where = f"{key} in config.json"
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"{where} is {section!r:.60}, not an object", AGAIN)
    if other and other != section:
        raise ConfigError(f"config.json has {SECTION} and a {OLDER} that differs", "remove one of them")
    descriptions = sorted(folder.glob(ModelSlim.PATTERN))
    if len(descriptions) > 1:
        raise CheckpointError(
            f"{folder} holds {len(descriptions)} quantization descriptions: "
            f"{', '.join(file.name for file in descriptions)}",
            "remove all but one",
        )
    found = read_json(descriptions[0]) if descriptions else None
    if found is not None and section and section != found:
        raise CheckpointError(
            f"{folder} describes its quantization twice, in config.json and in {descriptions[0].name}",
            "remove one of the descriptions",
        )
    if found is not None:
        return ModelSlim.read(descriptions[0].name, found)
    if not section:
        return None
    if ModelSlim.describes(section):
        return ModelSlim.read(where, section)
    method = section.get("quant_method")
    if method != CompressedTensors.format:
        named = "no quant_method" if method is None else f"the quant_method {method!r:.60}"
        raise ConfigError(
            f"{where} has {named}, which hal does not support",
            f"{supported()}; or use a checkpoint in float32, bfloat16 or float16",
        )
    return CompressedTensors.read(section)
