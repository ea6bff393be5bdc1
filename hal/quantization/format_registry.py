"""The registered checkpoint formats of all installed packages, and which of them describes a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hal.config.plugins import Plugins, instance_of
from hal.errors import CheckpointError, ConfigError
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization, supported
from hal.quantization.int8_arithmetic import AGAIN

GROUP = "hal.formats"
FORMATS: Plugins[CheckpointFormat] = Plugins(GROUP, "checkpoint format", instance_of(CheckpointFormat, GROUP))
SECTION, OLDER = "quantization_config", "compression_config"
"""The keys of the section in config.json. The first versions of compressed-tensors wrote the second in place of the
first."""


def formats() -> Mapping[str, CheckpointFormat]:
    """Return the registered formats, by name. Logs a warning for each that cannot be loaded."""
    return FORMATS.load_all().plugins


def config_keys() -> tuple[str, ...]:
    """Return the keys of config.json about quantization, which models do not read."""
    return (SECTION, OLDER, *(key for each in formats().values() for key in each.config_keys))


def read_quantization(folder: Path, config: Mapping[str, Any]) -> tuple[CheckpointFormat, Quantization] | None:
    """Return the quantization of the checkpoint in ``folder`` with this config.json, and its format; or None.

    Raises:
        ConfigError: hal does not support the quantization.
        CheckpointError: the description is damaged.
    """
    key = SECTION if config.get(SECTION) or not config.get(OLDER) else OLDER
    content, other = config.get(key), config.get(OLDER)
    where = f"{key} in config.json"
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{where} is {content!r:.60}, not an object", AGAIN)
    if other and other != content:
        raise ConfigError(f"config.json has {SECTION} and a {OLDER} that differs", "remove one of them")
    section = ConfigSection(where, content) if content else None
    read = ((each, each.read(folder, section)) for each in formats().values())
    found = [(each, quantization) for each, quantization in read if quantization is not None]
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} describes its quantization in the formats {' and '.join(each.name for each, _ in found)}",
            "remove one of the descriptions",
        )
    if section is not None and not found:
        method = section.content.get("quant_method")
        named = "no quant_method" if method is None else f"the quant_method {method!r:.60}"
        raise ConfigError(
            f"{where} has {named}, which hal does not support",
            f"{supported()}; or use a checkpoint in float32, bfloat16 or float16",
        )
    return found[0] if found else None
