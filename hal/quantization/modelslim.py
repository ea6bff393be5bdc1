"""The format of ModelSlim: ``quant_model_description.json`` has the quantization type of each tensor.

Its first versions wrote the same table into config.json, as ``quantization_config``.

Source: msModelSlim's documentation of its weight format (AscendV1), and MindIE's of W8A8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hal.errors import CheckpointError, ConfigError
from hal.quantization.description import Quantization, Writer
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.scheme import Scheme
from hal.quantization.scheme_registry import schemes, supported

FILE = "quant_model_description.json"
MODELSLIM = "modelslim"
_FLOAT = "FLOAT"
_OTHERS = ("kv_quant_type", "kv_cache_type", "fa_quant_type")
"""Keys for quantization of the cache and of attention, which hal does not support."""


class ModelSlim(Quantization):
    """Quantization by a type for every tensor.

    Args:
        file: the description's file name, or its key in config.json, for errors.
        types: the type of each tensor, by name.
    """

    format = MODELSLIM
    PATTERN = "quant_model_description*.json"

    def __init__(self, file: str, types: Mapping[str, Any]) -> None:
        self._file = file
        self._types = types

    @staticmethod
    def describes(section: Mapping[str, Any]) -> bool:
        """Return whether a ``quantization_config`` is a description: it has types of weights."""
        return any(name.endswith(".weight") for name in section)

    @classmethod
    def read(cls, file: str, description: Mapping[str, Any]) -> ModelSlim:
        """Read a description.

        Raises:
            ConfigError: hal does not support a setting of the whole model.
        """
        for key in _OTHERS:
            if (value := description.get(key)) not in (None, "", _FLOAT):
                raise ConfigError(f"{file} has {key} {value!r:.60}, which hal does not support", supported())
        return cls(file, description)

    def scheme(self, layer: str) -> Scheme | None:
        name = f"{layer}.weight"
        if name not in self._types:
            raise CheckpointError(f"{self._file} has no quantization type for {name}", AGAIN)
        found = self._types[name]
        known = {scheme.spellings[MODELSLIM]: scheme for scheme in schemes().values() if MODELSLIM in scheme.spellings}
        if found == _FLOAT:
            return None
        if not isinstance(found, str) or found not in known:
            raise CheckpointError(
                f"{self._file} has the quantization type {found!r:.60} for {name}, which hal does not support",
                f"use one of {', '.join((_FLOAT, *known))}: {supported()}",
            )
        return known[found]


class ModelSlimWriter(Writer):
    """Writes the format that :class:`ModelSlim` reads."""

    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        kind = scheme.spellings[MODELSLIM]
        types = {name: kind if quantized else _FLOAT for name, quantized in sorted(tensors.items())}
        return {"config.json": dict(config), FILE: {"model_quant_type": kind, "version": "1.0.0", **types}}
