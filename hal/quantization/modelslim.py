"""The format of ModelSlim: ``quant_model_description.json`` says of each tensor how it is quantised.

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
"""Quantisation of the cache and of attention, which must not be asked for."""


class ModelSlim(Quantization):
    """Quantisation by a description of every tensor.

    Args:
        file: the description's name, for errors.
        types: by tensor's name.
    """

    format = MODELSLIM
    PATTERN = "quant_model_description*.json"

    def __init__(self, file: str, types: Mapping[str, Any]) -> None:
        self._file = file
        self._types = types

    @classmethod
    def read(cls, file: str, description: Mapping[str, Any]) -> ModelSlim:
        """Take over a description.

        Raises:
            ConfigError: it says something of the whole model that hal does not read.
        """
        for key in _OTHERS:
            if (value := description.get(key)) not in (None, "", _FLOAT):
                raise ConfigError(f"{file} says {key} {value!r:.60}, which hal does not read", supported())
        return cls(file, description)

    def scheme(self, layer: str) -> Scheme | None:
        name = f"{layer}.weight"
        if name not in self._types:
            raise CheckpointError(f"{self._file} does not say how {name} is quantised", AGAIN)
        found = self._types[name]
        known = {scheme.spellings[MODELSLIM]: scheme for scheme in schemes().values() if MODELSLIM in scheme.spellings}
        if found == _FLOAT:
            return None
        if not isinstance(found, str) or found not in known:
            raise CheckpointError(
                f"{self._file} says {found!r:.60} of {name}, which hal does not read",
                f"it reads {', '.join((_FLOAT, *known))}: {supported()}",
            )
        return known[found]


class ModelSlimWriter(Writer):
    """Writes what :class:`ModelSlim` reads."""

    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        kind = scheme.spellings[MODELSLIM]
        types = {name: kind if quantised else _FLOAT for name, quantised in sorted(tensors.items())}
        return {
            "config.json": dict(config),
            FILE: {"model_quant_type": kind, "version": "1.0.0", **types},
        }
