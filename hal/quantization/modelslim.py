"""The format of ModelSlim: ``quant_model_description.json`` has the quantization type of each tensor.

Its first versions wrote the same table into config.json, as ``quantization_config``.

Source: msModelSlim's documentation of its weight format (AscendV1), and MindIE's of W8A8 and of mixed W4A8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hal.config.untrusted_files import read_json
from hal.errors import CheckpointError, ConfigError
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.format_registry import supported
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.scheme import Scheme

FILE = "quant_model_description.json"
PATTERN = "quant_model_description*.json"
MODELSLIM = "modelslim"
ZERO_POINT = "weight_offset"
"""The tensor of the zero points of a weight."""
INT4 = "W4A8_DYNAMIC"
"""The type of int4 weights, which files of :data:`VERSION` pack."""
INT4_ONLY = "W4A16"
"""The type of int4 weights with floating-point activations, which AscendV1 does not list."""
VERSION = "1.0.0"
_FLOAT = "FLOAT"
_OTHERS = ("kv_quant_type", "kv_cache_type", "fa_quant_type")
"""Keys for quantization of the cache and of attention, which hal does not support."""


class ModelSlimQuantization(Quantization):
    """Quantization by a type for every tensor.

    Args:
        section: the description, with the file's name or its key in config.json, for errors.
        schemes: the schemes by type.
    """

    def __init__(self, section: ConfigSection, schemes: Mapping[str, Scheme]) -> None:
        self._section, self._schemes = section, schemes

    def scheme(self, layer: str) -> Scheme | None:
        name, file, types = f"{layer}.weight", self._section.name, self._section.content
        if name not in types:
            raise CheckpointError(f"{file} has no quantization type for {name}", AGAIN)
        found = types[name]
        if found == _FLOAT:
            return None
        if found == INT4_ONLY:
            raise CheckpointError(
                f"{file} has the quantization type {found!r} for {name}, which hal does not support: it is no type of "
                "AscendV1, and msModelSlim does not document how it packs these weights",
                "convert it to AWQ or GPTQ with msModelSlim's example/ms_to_vllm.py, or quantize the original with "
                "W4A8_DYNAMIC or W8A16, or with hal quantize --scheme w4a16",
            )
        if not isinstance(found, str) or found not in self._schemes:
            raise CheckpointError(
                f"{file} has the quantization type {found!r:.60} for {name}, which hal does not support",
                f"use one of {', '.join((_FLOAT, *self._schemes))}: {supported()}",
            )
        if found == INT4 and types.get("version") != VERSION:
            raise CheckpointError(
                f"{file} has the version {types.get('version')!r:.60}, in which hal does not read {found} for {name}",
                f"quantize it with a msModelSlim that writes the version {VERSION}",
            )
        # Types without groups have no use for their size, which is 0 where no type has groups.
        return self._schemes[found].configured({"group_size": types.get("group_size") or -1})

    def exclusion(self, layer: str) -> str:
        return f"{_FLOAT!r} in {self._section.name}"

    def states_dtype(self, layer: str) -> bool:
        return f"{layer}.weight" in self._section.content


class ModelSlim(CheckpointFormat):
    """The format of ModelSlim. Schemes describe themselves by the name of a type."""

    name = MODELSLIM
    config_keys = ("quantize",)

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        files = sorted(folder.glob(PATTERN))
        if len(files) > 1:
            raise CheckpointError(
                f"{folder} holds {len(files)} quantization descriptions: {', '.join(file.name for file in files)}",
                "remove all but one",
            )
        if files:
            found = ConfigSection(files[0].name, read_json(files[0]))
            if section is not None and section.content != found.content:
                raise CheckpointError(
                    f"{folder} describes its quantization twice, in config.json and in {found.name}",
                    "remove one of the descriptions",
                )
        elif section is not None and any(name.endswith(".weight") for name in section.content):
            found = section
        else:
            return None
        for key in _OTHERS:
            if (value := found.content.get(key)) not in (None, "", _FLOAT):
                raise ConfigError(f"{found.name} has {key} {value!r:.60}, which hal does not support", supported())
        return ModelSlimQuantization(found, {each.description: scheme for scheme, each in self.known().values()})

    def describe(
        self,
        config: Mapping[str, Any],
        scheme: Scheme,
        kept: Iterable[str],
        tensors: Mapping[str, bool],
        others: Mapping[str, Scheme],
    ) -> dict[str, dict[str, Any]]:
        if others:
            raise ConfigError(
                f"hal writes one scheme in the format {self.name}, and {next(iter(others))} has another",
                "use --format compressed-tensors",
            )
        kind = self.known()[scheme.name][1].description
        types = {name: kind if quantized else _FLOAT for name, quantized in sorted(tensors.items())}
        return {"config.json": dict(config), FILE: {"model_quant_type": kind, "version": VERSION, **types}}
