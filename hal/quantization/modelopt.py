"""The format of NVIDIA's ModelOpt: ``quant_method`` ``modelopt`` in config.json, or ``hf_quant_config.json``.

Sources: the documentation of ModelOpt and of vLLM's reader of its checkpoints; descriptions that NVIDIA has published.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs

from hal.config.untrusted_files import is_there, read_json
from hal.errors import CheckpointError, ConfigError
from hal.ops.forms import Form
from hal.quantization.checkpoint_format import CacheQuantization, CheckpointFormat, ConfigSection, Quantization
from hal.quantization.float4 import BlockFloats
from hal.quantization.forms import MXFP8, NVFP4, in_blocks
from hal.quantization.fp8 import Fp8Scales
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.layer_patterns import other_names
from hal.quantization.stored_layer import StoredAs

FILE = "hf_quant_config.json"
METHODS = ("modelopt", "modelopt_fp8", "modelopt_fp4", "modelopt_mixed")
MIXED = "mixed_precision"
BLOCK = 128
"""The rows and columns of a block of ``FP8_PB_WO`` whose description states no size."""
_WHOLE, _ROWS, _STATIC = (Form("float8", inputs=each) for each in ("float", "float8", "static_float8"))
_FLOAT4 = BlockFloats("weight", "weight_scale_2", "input_scale", divides=False)
ALGORITHMS: Mapping[str, StoredAs] = {
    "fp8": StoredAs(_STATIC, Fp8Scales("tensor", "weight_scale")),
    "fp8_per_channel_per_token": StoredAs(_ROWS, Fp8Scales("channel", "weight_scale")),
    "fp8_pb_wo": StoredAs(_WHOLE, Fp8Scales("block", "weight_scale", ones=True)),
    "mxfp8": StoredAs(MXFP8, _FLOAT4),
    "nvfp4": StoredAs(NVFP4, _FLOAT4),
    "w4a16_nvfp4": StoredAs(NVFP4, _FLOAT4),
}
"""How layers are stored, by ``quant_algo`` in lower case; the blocks of ``fp8_pb_wo`` are those of a description."""


class ModelOptQuantization(Quantization):
    """Quantization by one algorithm, or by one for each layer.

    Args:
        section: the description, with what errors call it.
        cache: how keys and values are kept.
        unapplied: see :class:`Quantization`.

    Raises:
        ConfigError: hal does not support an algorithm.
        CheckpointError: a list or table is none.
    """

    def __init__(
        self, section: ConfigSection, cache: CacheQuantization | None = None, unapplied: tuple[str, ...] = ()
    ) -> None:
        self.cache, self.unapplied, self._where = cache, unapplied, section.name
        key = next((each for each in ("ignore", "exclude_modules") if section.content.get(each) is not None), "ignore")
        self._excluded, self._list = section.content.get(key) or [], f"{key} of {section.name}"
        if not isinstance(self._excluded, list) or not all(isinstance(each, str) for each in self._excluded):
            raise CheckpointError(f"{self._list} is {self._excluded!r:.60}, not a list of names", AGAIN)
        algorithm, layers = section.value("quant_algo"), section.value("quantized_layers", default={})
        if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
            raise CheckpointError(f"quantized_layers of {section.name} is {layers!r:.60}, not a table of layers", AGAIN)
        mixed = algorithm == MIXED or (algorithm is None and bool(layers))
        self._layers = {
            name: _stored_as(ConfigSection(f"{name:.80} of {section.name}", each))
            for name, each in (layers.items() if mixed else ())
        }
        self._others = None if mixed or algorithm is None else _stored_as(section)

    def stored_as(self, layer: str) -> StoredAs | None:
        if self._exclusion(layer) is not None:
            return None
        for name in (layer, *other_names(layer)) if self._layers else ():
            if (
                found := next((self._layers[each] for each in _modules(name) if each in self._layers), None)
            ) is not None:
                return found
        return self._others

    def exclusion(self, layer: str) -> str:
        entry = self._exclusion(layer)
        return f"the lack of an entry in {self._where}" if entry is None else f"{entry!r:.80} in {self._list}"

    def _exclusion(self, layer: str) -> str | None:
        modules = [*_modules(layer)]
        return next((each for each in self._excluded if any(fnmatchcase(name, each) for name in modules)), None)


def _modules(layer: str) -> Iterator[str]:
    """Yield the name of a layer, and those of the modules that contain it, the closest first."""
    while layer:
        yield layer
        layer = layer.rpartition(".")[0]


def _stored_as(section: ConfigSection) -> StoredAs:
    """Return how the layers of a description with ``quant_algo`` are stored.

    Raises:
        ConfigError: hal does not support it.
    """
    algorithm, size = section.value("quant_algo"), section.value("group_size")
    if (found := ALGORITHMS.get(str(algorithm))) is None:
        raise ConfigError(
            f"{section.name} has the quant_algo {algorithm!r:.60}, which hal does not support",
            f"use a checkpoint in {', '.join(map(str.upper, ALGORITHMS))}, or unquantized",
        )
    if algorithm == "fp8_pb_wo":
        form = in_blocks({"strategy": "block", "block_structure": [BLOCK if size is None else size] * 2})
        return attrs.evolve(found, form=form)
    if found.form.columns and size not in (None, found.form.columns):
        raise ConfigError(
            f"{section.name} has the group_size {size!r:.60} of {str(algorithm).upper()}",
            f"use a checkpoint with groups of {found.form.columns}",
        )
    return found


class ModelOpt(CheckpointFormat):
    """The format of ModelOpt."""

    name = "modelopt"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is not None and section.content.get("quant_method") not in METHODS:
            return None
        if section is None or not {"quant_algo", "quantized_layers"} & section.content.keys():
            if not is_there(folder / FILE):
                if section is None:
                    return None
                raise CheckpointError(f"{section.name} has no quant_algo, and {folder} has no {FILE}", AGAIN)
            content = read_json(folder / FILE).get("quantization")
            if not isinstance(content, dict):
                raise CheckpointError(f"{FILE} has quantization {content!r:.60}, not an object", AGAIN)
            section = ConfigSection(FILE, content)
        unapplied = [f"4-bit activations (quant_algo {each}) of {section.name}" for each in _unrounded(section)]
        cache = section.value("kv_cache_quant_algo")
        scheme: Any = section.value("kv_cache_scheme")
        if cache is None and isinstance(scheme, dict) and scheme:
            kind = scheme.get("type"), scheme.get("num_bits"), scheme.get("dynamic", False)
            cache = "fp8" if kind == ("float", 8, False) else str(scheme)
        if cache not in (None, "fp8"):
            unapplied.append(f"the cache in {cache!s:.60} of {section.name}")
        kept = CacheQuantization("fp8", "{0}_proj.{0}_scale") if cache == "fp8" else None
        return ModelOptQuantization(section, kept, tuple(unapplied))


def _unrounded(section: ConfigSection) -> list[str]:
    """Return the algorithms of a description whose activations of 4 bits hal does not round."""
    layers = section.content.get("quantized_layers")
    parts = [section.content, *(layers.values() if isinstance(layers, dict) else ())]
    found = {str(each.get("quant_algo")).upper() for each in parts if isinstance(each, dict)}
    return sorted(found & {"NVFP4"})
