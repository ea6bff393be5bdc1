"""compressed-tensors, the format of llm-compressor: ``quantization_config`` in config.json describes the layers.

Source: the documentation of compressed-tensors; ``int-quantized`` with W8A8 as vLLM reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from hal.errors import CheckpointError, ConfigError
from hal.ops.forms import Form
from hal.quantization.checkpoint_format import (
    CacheQuantization,
    CheckpointFormat,
    ConfigSection,
    Quantization,
    Written,
    supported,
)
from hal.quantization.float4 import BlockFloats
from hal.quantization.forms import INT8, INT8_STATIC, MXFP4, NVFP4, in_blocks, in_groups
from hal.quantization.fp8 import Fp8Scales
from hal.quantization.int8_rows import CompressedStatic, Int8Rows
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.layer_patterns import LayerPattern, other_names
from hal.quantization.packed_tensors import PackedTensors, WholeTensors
from hal.quantization.stored_layer import StoredAs, Writer

_WHERE = "quantization_config in config.json"
WHOLE, PACKED, FLOATS = "int-quantized", "pack-quantized", "float-quantized"
"""The formats that have each number as an int8, that pack numbers into int32, and that have float8."""
TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
"""Int8 activations with a scale of a tensor, symmetric or not."""
ROUNDED = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True}
"""Int8 activations with scales that are computed as the model runs: for the strategy ``token``, of each token."""
# Defaults of keys. A type, a number of bits and a strategy are required.
_DEFAULTS = {"symmetric": True, "dynamic": False}
_UNSET = ("group_size", "block_structure", "actorder")
"""Keys of weights and activations that must be absent or null, as :func:`effective` leaves them."""
_ORDERS = {None: None, False: None, "weight": None, "static": None, True: "group", "group": "group", "dynamic": "group"}
"""Values of ``actorder`` and what they mean for a file: nothing, or that groups have inputs in another order."""
_DENSE = "dense"
"""The format of a sparsity_config whose weights are stored whole; its other keys are statistics."""
_FLOAT4 = {"nvfp4-pack-quantized": (NVFP4, "tensor_group"), "mxfp4-pack-quantized": (MXFP4, "group")}
"""The forms and strategies of formats of 4-bit floating-point numbers."""
ZERO_POINT = "weight_zero_point"
"""The tensor of the zero points of a weight."""
ROWS, WHOLES, PACKEDS, FLOAT4S = Int8Rows(ZERO_POINT), WholeTensors(), PackedTensors(), BlockFloats()
WRITTEN: Mapping[str, tuple[str, Writer]] = MappingProxyType(
    {
        "fp8": (FLOATS, Fp8Scales("channel", "weight_scale")),
        "fp8_dynamic": (FLOATS, Fp8Scales("channel", "weight_scale")),
        "w4a16": (PACKED, PACKEDS),
        "w4a8_dynamic": (WHOLE, WHOLES),
        "w8a16": (WHOLE, ROWS),
        "w8a16_group": (PACKED, PACKEDS),
        "w8a8": (WHOLE, CompressedStatic(ZERO_POINT)),
        "w8a8_dynamic": (WHOLE, ROWS),
    }
)
"""The format that each name of a form is written in, and what writes it."""


@attrs.frozen
class LayerTargets:
    """Layers selected by exact name, by ``re:`` and a regular expression matched from the start, or by ``Linear``."""

    names: frozenset[str]
    patterns: tuple[LayerPattern, ...]
    every: bool

    @classmethod
    def of(cls, entries: object, where: str) -> LayerTargets:
        """Read a list of names and patterns.

        Raises:
            CheckpointError: it is not a list of strings, or a regular expression is invalid.
            ConfigError: hal does not support a regular expression.
        """
        if not isinstance(entries, list) or not all(isinstance(each, str) for each in entries):
            raise CheckpointError(f"{where} of {_WHERE} is {entries!r:.60}, not a list of names", AGAIN)
        patterns = tuple(
            LayerPattern(each.removeprefix("re:"), f"{where} of {_WHERE}") for each in entries if each.startswith("re:")
        )
        return cls(frozenset(each for each in entries if not each.startswith("re:")), patterns, "Linear" in entries)

    def entry(self, layer: str) -> str | None:
        """Return the name or the regular expression that selects a layer, or None; ``Linear`` does not count.

        Raises:
            ConfigError: a regular expression takes too long.
        """
        if layer in self.names:
            return layer
        return next((f"re:{pattern.text}" for pattern in self.patterns if pattern.match(layer)), None)


class CompressedTensorsQuantization(Quantization):
    """Quantization by ``quantization_config``.

    Args:
        groups: how layers are stored, and which. A group that names a layer takes precedence over one for ``Linear``.
        ignore: the layers that are not quantized.
        cache: how keys and values are kept.
        unapplied: see :class:`Quantization`.
    """

    def __init__(
        self,
        groups: Sequence[tuple[StoredAs, LayerTargets]],
        ignore: LayerTargets,
        cache: CacheQuantization | None = None,
        unapplied: tuple[str, ...] = (),
    ) -> None:
        self.cache, self.unapplied = cache, unapplied
        self._groups = tuple(groups)
        self._ignore = ignore

    def stored_as(self, layer: str) -> StoredAs | None:
        if self._ignored(layer) is not None:
            return None
        for name in (layer, *other_names(layer)):
            for found, targets in self._groups:
                if targets.entry(name) is not None:
                    return found
        return next((found for found, targets in self._groups if targets.every), None)

    def exclusion(self, layer: str) -> str:
        entry = self._ignored(layer)
        if entry is None:
            return f"the lack of a target in config_groups of {_WHERE}"
        return f"{entry!r:.80} in ignore of {_WHERE}"

    def _ignored(self, layer: str) -> str | None:
        return "Linear" if self._ignore.every else self._ignore.entry(layer)


class CompressedTensors(CheckpointFormat):
    """The format compressed-tensors."""

    name = "compressed-tensors"
    writers = MappingProxyType({name: writer for name, (_, writer) in WRITTEN.items()})

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        content = section.content
        for key in ("sparsity_config", "transform_config"):
            value = content.get(key)
            dense = key == "sparsity_config" and isinstance(value, dict) and value.get("format") == _DENSE
            if not (dense or _is_empty(value)):
                raise ConfigError(f"{_WHERE} has a {key}, {value!r:.80}, which hal does not support", supported())
        groups, cache = content.get("config_groups"), _cache(content.get("kv_cache_scheme"))
        if (
            not isinstance(groups, dict)
            or not (groups or cache)
            or not all(isinstance(each, dict) for each in groups.values())
        ):
            raise CheckpointError(f"{_WHERE} has no config_groups", AGAIN)
        read, unapplied = [], []
        for name, group in groups.items():
            found = _stored_as(group, name, content.get("format"))
            read.append((found, LayerTargets.of(group.get("targets"), "targets")))
            if (given := group.get("input_activations")) and found.form.inputs == "float":
                kind = f"{given.get('num_bits')!r:.60} bits, {given.get('type')!s:.60}"
                unapplied.append(f"input_activations of {name} ({kind}) in {_WHERE}")
        ignored = [] if content.get("ignore") is None else content["ignore"]
        return CompressedTensorsQuantization(read, LayerTargets.of(ignored, "ignore"), cache, tuple(unapplied))

    def describe(
        self, config: Mapping[str, Any], written: Written, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        groups = {"group_0": _described(written.form, ["Linear"])}
        for number, (name, (scheme, form)) in enumerate(sorted(written.others.items()), 1):
            groups[f"group_{number}"] = {**_described(form, [name]), "format": WRITTEN[scheme][0]}
        section = {
            "quant_method": self.name,
            "format": WRITTEN[written.scheme][0],
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(kept),
            "kv_cache_scheme": None,
        }
        return {"config.json": {**config, "quantization_config": section}}


def _described(form: Form, targets: Sequence[str]) -> dict[str, Any]:
    """Return the group of ``config_groups`` of weights in a form."""
    unset = dict.fromkeys((*_UNSET, "observer"))
    weights = {
        "num_bits": form.kind.bits,
        "type": "int" if form.numbers.startswith("int") else "float",
        "symmetric": not form.zero_points,
        "strategy": "group" if form.columns else "channel",
        "dynamic": False,
    }
    by_token = {**ROUNDED, "strategy": "token"}
    rounded = {"float8": {**by_token, "type": "float"}, "int8": by_token, "static_int8": {**TENSOR, "symmetric": True}}
    inputs = rounded.get(form.inputs)
    return {
        "targets": targets,
        "weights": {**weights, **unset, "group_size": form.columns or None},
        "input_activations": None if inputs is None else {**inputs, **unset},
        "output_activations": None,
    }


def _stored_as(group: Mapping[str, Any], name: str, format: Any) -> StoredAs:
    """Return how the layers of a group are stored.

    Raises:
        ConfigError: hal does not support it.
    """
    if group.get("output_activations"):
        problem = f"{_WHERE} quantizes output_activations in {name}, which hal does not support"
        raise ConfigError(problem, supported())
    format = group.get("format") or format
    weights = _section(group, "weights", name)
    if weights is None:
        raise ConfigError(f"{_WHERE} has no weights of {name}", supported())
    inputs = _section(group, "input_activations", name)
    of_weights, of_inputs = f"weights of {name}", f"input_activations of {name}"
    if weights.get("type") == "float":
        wanted: dict[str, Any] = {"symmetric": True, "dynamic": False}
        if weights.get("num_bits") == 4:
            _check_format(format, name, *_FLOAT4)
            form, strategy = _FLOAT4[format]
            require(weights, {**wanted, "strategy": strategy, "group_size": form.columns}, of_weights)
            return StoredAs(_with_inputs(form, inputs, of_inputs), FLOAT4S)
        _check_format(format, name, FLOATS)
        require(weights, {"num_bits": 8, **wanted}, of_weights, ("block_structure",))
        form = _with_inputs(in_blocks(weights), inputs, of_inputs)
        return StoredAs(form, Fp8Scales(str(weights.get("strategy")), "weight_scale"))
    _check_format(format, name, WHOLE, PACKED)
    bits = 4 if weights.get("num_bits") == 4 else 8
    require(weights, {"num_bits": bits, "type": "int", "dynamic": False}, of_weights, ("group_size", "actorder"))
    form = in_groups(Form(f"int{bits}"), weights)
    in_rows = form == INT8 and format == WHOLE and weights.get("strategy") == "channel"
    if inputs is not None and not inputs.get("dynamic", False):
        require(inputs, TENSOR, of_inputs)
        if not in_rows:
            require(weights, {"num_bits": 8, "symmetric": True, "strategy": "channel"}, of_weights)
            _check_format(format, name, WHOLE)
        symmetric = inputs.get("symmetric", True) is True
        return StoredAs(INT8_STATIC, CompressedStatic(ZERO_POINT, symmetric=symmetric))
    if inputs is not None:
        require(inputs, ROUNDED, of_inputs, _UNSET)
        # Beside weights of other forms, hal does not round them.
        if inputs.get("strategy") == "token" and not form.zero_points and (in_rows or bits == 4):
            form = attrs.evolve(form, inputs="int8")
    return StoredAs(form, ROWS if in_rows else WHOLES if format == WHOLE else PACKEDS)


def _with_inputs(form: Form, inputs: Mapping[str, Any] | None, where: str) -> Form:
    """Return a form of floating-point numbers, which rounds inputs to float8 by token, or with a scale of a tensor."""
    if inputs is None:
        return form
    if inputs.get("num_bits") != form.kind.bits:
        require(inputs, {"num_bits": 8}, where, _UNSET)
    require(inputs, {"type": "float", "symmetric": True}, where, _UNSET)
    kind = inputs.get("dynamic", False), inputs.get("strategy")
    if inputs.get("num_bits") == 8 and kind == (True, "token"):
        return attrs.evolve(form, inputs="float8")
    if inputs.get("num_bits") == 8 and kind == (False, "tensor") and form.numbers == "float8":
        return attrs.evolve(form, inputs="static_float8")
    return form  # hal does not round others


def _check_format(found: Any, name: str, *wanted: str) -> None:
    if found not in wanted:
        problem = f"the format of {name} in {_WHERE} is {found!r:.60}, not {' or '.join(map(repr, wanted))}"
        raise ConfigError(problem, supported())


def _section(group: Mapping[str, Any], part: str, name: str) -> Mapping[str, Any] | None:
    """Return the weights or activations of a group without values that have no effect; None if there are none."""
    found = group.get(part)
    if not found:
        return None
    if not isinstance(found, dict):
        raise ConfigError(f"the {part} of {name} in {_WHERE} are {found!r:.60}, not a section", supported())
    return effective(found, f"{part} of {name}")


def effective(section: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a section of weights or activations without values that have no effect on a file.

    Raises:
        ConfigError: ``actorder`` is unknown.
    """
    size, order = section.get("group_size"), section.get("actorder")
    size = None if size == -1 else size
    order = order.lower() if isinstance(order, str) else order
    if not isinstance(order, str | bool | None) or order not in _ORDERS:
        raise ConfigError(f"actorder of the {where} in {_WHERE} is {order!r:.60}", "use null, weight or group")
    return {**section, "group_size": size, "actorder": None if size is None else _ORDERS[order]}


def require(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str, free: Collection[str] = ()) -> None:
    """Raise ConfigError unless a section has the wanted keys and values, and of others only those in ``free``."""
    for key, value in wanted.items():
        has = found.get(key, _DEFAULTS.get(key))
        if has != value or type(has) is not type(value):
            raise ConfigError(f"{key} of the {where} in {_WHERE} is {has!r:.60}, not {value!r}", supported())
    for key in _UNSET:
        if key not in wanted and key not in free and found.get(key) is not None:
            raise ConfigError(f"{_WHERE} has {key} {found[key]!r:.60} in the {where}", supported())


def _cache(scheme: object) -> CacheQuantization | None:
    """Return how ``kv_cache_scheme`` keeps keys and values; None if it is empty.

    Raises:
        ConfigError: hal does not support it.
    """
    if _is_empty(scheme):
        return None
    where = f"kv_cache_scheme in {_WHERE}"
    if not isinstance(scheme, dict):
        raise ConfigError(f"{where} is {scheme!r:.60}, not a section", supported())
    kind = scheme.get("type")
    if kind not in ("int", "float"):
        raise ConfigError(f"{where} has the type {kind!r:.60}, not 'int' or 'float'", supported())
    wanted: dict[str, Any] = {"num_bits": 8, "symmetric": True}
    dynamic = scheme.get("dynamic", False)
    if dynamic is not True:
        wanted |= {"dynamic": False, "strategy": "tensor"}
    require(effective(scheme, "kv_cache_scheme"), wanted, "kv_cache_scheme", ("group_size",))
    return CacheQuantization("int8" if kind == "int" else "fp8", None if dynamic else "{0}_scale")


def _is_empty(value: Any) -> bool:
    """Return whether a section is absent, null, or has no value other than such sections."""
    return all(map(_is_empty, value.values())) if isinstance(value, dict) else value in (None, [])
