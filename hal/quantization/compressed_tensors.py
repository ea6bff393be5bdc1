"""compressed-tensors, the format of llm-compressor: ``quantization_config`` in config.json describes the layers.

Source: the documentation of compressed-tensors; ``int-quantized`` with W8A8 as vLLM reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from hal.quantization.forms import INT8, INT8_DYNAMIC, INT8_STATIC, in_blocks, in_groups
from hal.quantization.fp8 import Fp8Scales
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.int8_rows import CompressedStatic, Int8Rows
from hal.quantization.layer_patterns import LayerPattern, other_names
from hal.quantization.packed_tensors import PackedTensors, WholeTensors
from hal.quantization.stored_layer import StoredAs, Writer

_WHERE = "quantization_config in config.json"
CHANNEL_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
"""Int8 weights with a scale per row."""
TENSOR = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
"""Int8 activations with a scale of a tensor, symmetric or not."""
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Int8 activations with a scale per token."""
ROUNDED = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True}
"""Activations beside weights in groups, which may be rounded in each token, and which hal does not round."""
WHOLE, PACKED = "int-quantized", "pack-quantized"
"""The formats that have each number as an int8, and that pack numbers into int32."""
# Defaults of keys. A type, a number of bits and a strategy are required.
_DEFAULTS = {"symmetric": True, "dynamic": False}
_UNSET = ("group_size", "block_structure", "actorder")
"""Keys of weights and activations that must be absent or null, as :func:`effective` leaves them."""
_ORDERS = {None: None, False: None, "weight": None, "static": None, True: "group", "group": "group", "dynamic": "group"}
"""Values of ``actorder`` and what they mean for a file: nothing, or that groups have inputs in another order."""
_DENSE = "dense"
"""The format of a sparsity_config whose weights are stored whole; its other keys are statistics."""
_FLOAT4 = ("nvfp4", "mxfp4")
"""Beginnings of formats of 4-bit floating-point numbers."""
ZERO_POINT = "weight_zero_point"
"""The tensor of the zero points of a weight."""


@attrs.frozen
class ConfigGroup:
    """A group of ``config_groups``: what it says of weights that hal reads in one way.

    Attributes:
        weights: required keys and values of ``weights``.
        input_activations: the same for ``input_activations``; None if the group must not have any.
        format: the ``format`` of the group, or else of the whole section.
        others: further formats.
        settings: keys of ``weights`` with any value.
        rounded: of activations that may be rounded, too, which hal does not do: their required keys and values.
        any_inputs: whether the group is as similar to one with activations.
    """

    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None
    format: str = "int-quantized"
    settings: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    rounded: Mapping[str, Any] | None = None
    any_inputs: bool = False

    def has_parts_of(self, group: Mapping[str, Any]) -> bool:
        """Return whether the checkpoint's group quantizes activations as this one does, in whichever way."""
        return self.any_inputs or (group.get("input_activations") is None) == (self.input_activations is None)

    def problems(self, group: Mapping[str, Any], name: str, format: Any) -> Iterator[str]:
        """Yield the differences of the checkpoint's group ``name``, as :func:`effective` returns it, from this one."""
        if format not in (self.format, *self.others):
            yield f"the format of {name} in {_WHERE} is {format!r:.60}, not {self.format!r}"
        for part, wanted in (("weights", self.weights), ("input_activations", self.input_activations)):
            found = group.get(part)
            if wanted is None:
                if found is None:
                    continue
                if self.rounded is None:
                    yield f"{_WHERE} has {part} of {name}"
                elif not isinstance(found, dict):
                    yield f"the {part} of {name} are {found!r:.60}, not a section"
                else:
                    yield from differences(found, self.rounded, tuple(found), f"{part} of {name}")
            elif not isinstance(found, dict):
                yield f"{_WHERE} has no {part} of {name}"
            else:
                yield from differences(found, wanted, self.settings, f"{part} of {name}")

    def written(self, form: Form) -> dict[str, Any]:
        """Return the group of a form as JSON."""
        unset, settings = dict.fromkeys((*_UNSET, "observer")), {}
        if "group_size" in self.settings:
            strategy = "group" if form.columns else "channel"
            settings = {"strategy": strategy, "group_size": form.columns or None, "symmetric": not form.zero_points}
        elif "strategy" in self.settings:
            settings = {"strategy": "channel"}
        activations = self.input_activations
        return {
            "targets": ["Linear"],
            "weights": {**self.weights, **unset, **settings},
            "input_activations": None if activations is None else {"symmetric": True, **activations, **unset},
        }


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


Reads = Callable[[Mapping[str, Any]], StoredAs]
"""Returns how layers are stored, from a group's ``weights`` with its ``format`` and ``input_activations``."""


def _integers(numbers: str, inputs: str = "float") -> Reads:
    def read(given: Mapping[str, Any]) -> StoredAs:
        return StoredAs(in_groups(Form(numbers, inputs=inputs), given), WHOLES if given["format"] == WHOLE else PACKEDS)

    return read


def _float8(given: Mapping[str, Any]) -> StoredAs:
    return StoredAs(in_blocks(given), Fp8Scales(str(given.get("strategy")), "weight_scale"))


def _static(given: Mapping[str, Any]) -> StoredAs:
    symmetric = (given.get("input_activations") or {}).get("symmetric") is True
    return StoredAs(INT8_STATIC, CompressedStatic(ZERO_POINT, symmetric=symmetric))


_GROUPS = frozenset({"strategy", "group_size", "actorder"})
_ORDERED = frozenset({"strategy", "group_size", "symmetric", "actorder"})
_PACKED = {"type": "int", "dynamic": False}
ROWS, WHOLES, PACKEDS = Int8Rows(ZERO_POINT), WholeTensors(), PackedTensors()
KINDS: Mapping[str, tuple[ConfigGroup, Reads, Writer]] = MappingProxyType(
    {
        "fp8": (
            ConfigGroup(
                {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False},
                None,
                "float-quantized",
                frozenset({"strategy", "block_structure"}),
                rounded={"num_bits": 8, "type": "float"},
                any_inputs=True,
            ),
            _float8,
            Fp8Scales("channel", "weight_scale"),
        ),
        "w4a16": (
            ConfigGroup({"num_bits": 4, **_PACKED}, None, PACKED, _ORDERED, (WHOLE,), rounded=ROUNDED),
            _integers("int4"),
            PACKEDS,
        ),
        "w4a8_dynamic": (
            ConfigGroup({"num_bits": 4, "symmetric": True, **_PACKED}, TOKEN, WHOLE, _GROUPS, (PACKED,)),
            _integers("int4", "int8"),
            WHOLES,
        ),
        "w8a16": (ConfigGroup(CHANNEL_WEIGHTS, None), lambda given: StoredAs(INT8, ROWS), ROWS),
        "w8a16_group": (
            ConfigGroup({"num_bits": 8, **_PACKED}, None, PACKED, _ORDERED, (WHOLE,), rounded=ROUNDED),
            _integers("int8"),
            PACKEDS,
        ),
        "w8a8": (ConfigGroup(CHANNEL_WEIGHTS, TENSOR), _static, CompressedStatic(ZERO_POINT)),
        "w8a8_dynamic": (ConfigGroup(CHANNEL_WEIGHTS, TOKEN), lambda given: StoredAs(INT8_DYNAMIC, ROWS), ROWS),
    }
)
"""What hal reads, and writes, by the name of its form."""


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
    writers = MappingProxyType({name: writer for name, (_, _, writer) in KINDS.items()})

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
            found, rounded = _stored_as(group, name, content.get("format"))
            read.append((found, LayerTargets.of(group.get("targets"), "targets")))
            if (given := group.get("input_activations")) and not rounded:
                kind = f"{given.get('num_bits')!r:.60} bits, {given.get('type')!s:.60}"
                unapplied.append(f"input_activations of {name} ({kind}) in {_WHERE}")
        ignored = [] if content.get("ignore") is None else content["ignore"]
        return CompressedTensorsQuantization(read, LayerTargets.of(ignored, "ignore"), cache, tuple(unapplied))

    def describe(
        self, config: Mapping[str, Any], written: Written, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        group, _, _ = KINDS[written.scheme]
        groups = {"group_0": {**group.written(written.form), "output_activations": None}}
        for number, (name, (scheme, form)) in enumerate(sorted(written.others.items()), 1):
            own, _, _ = KINDS[scheme]
            section = {**own.written(form), "targets": [name], "format": own.format}
            groups[f"group_{number}"] = {**section, "output_activations": None}
        section = {
            "quant_method": self.name,
            "format": group.format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted(kept),
            "kv_cache_scheme": None,
        }
        return {"config.json": {**config, "quantization_config": section}}


def _stored_as(group: Mapping[str, Any], name: str, format: Any) -> tuple[StoredAs, bool]:
    """Return how the layers of a group are stored, and whether their activations are rounded.

    Raises:
        ConfigError: hal reads none such. It has a difference from the most similar one.
    """
    parts = {part: group.get(part) for part in ("weights", "input_activations")}
    found_parts = {part: effective(each, f"{part} of {name}") for part, each in parts.items() if each}
    group = {**group, "input_activations": None, **found_parts}
    if group.get("output_activations"):
        problem = f"{_WHERE} quantizes output_activations in {name}, which hal does not support"
        raise ConfigError(problem, supported())
    kind = group.get("format") or format
    if isinstance(kind, str) and kind.startswith(_FLOAT4):
        raise ConfigError(f"{_WHERE} has the format {kind!r:.60}, which hal does not support", supported())
    found = []
    for wanted, reads, _ in KINDS.values():
        problems = list(wanted.problems(group, name, kind))
        rounds = wanted.input_activations is not None
        found.append((bool(problems), not wanted.has_parts_of(group), len(problems), problems, reads, rounds))
    *_, problems, nearest, rounds = min(found, key=lambda each: each[:3])
    if problems:
        raise ConfigError(problems[0], supported())
    return nearest({**group["weights"], "format": kind, "input_activations": group["input_activations"]}), rounds


def effective(section: Any, where: str) -> Any:
    """Return a section of weights or activations without values that have no effect on a file.

    Args:
        section: the section. If it is not an object, it stays.
        where: its name, for errors.

    Raises:
        ConfigError: ``actorder`` is unknown.
    """
    if not isinstance(section, dict):
        return section
    size, order = section.get("group_size"), section.get("actorder")
    size = None if size == -1 else size
    order = order.lower() if isinstance(order, str) else order
    if not isinstance(order, str | bool | None) or order not in _ORDERS:
        raise ConfigError(f"actorder of the {where} in {_WHERE} is {order!r:.60}", "use null, weight or group")
    return {**section, "group_size": size, "actorder": None if size is None else _ORDERS[order]}


def differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], settings: Collection[str], where: str
) -> Iterator[str]:
    """Yield the differences of a section from the wanted keys and values. Keys in ``settings`` have any value."""
    for key, value in wanted.items():
        has = found.get(key, _DEFAULTS.get(key))
        if has != value or type(has) is not type(value):
            yield f"{key} of the {where} in {_WHERE} is {has!r:.60}, not {value!r}"
    for key in _UNSET:
        if key not in wanted and key not in settings and found.get(key) is not None:
            yield f"{_WHERE} has {key} {found[key]!r:.60} in the {where}"


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
    for problem in differences(effective(scheme, "kv_cache_scheme"), wanted, ("group_size",), "kv_cache_scheme"):
        raise ConfigError(problem, supported())
    return CacheQuantization("int8" if kind == "int" else "fp8", scales=not dynamic)


def _is_empty(value: Any) -> bool:
    """Return whether a section is absent, null, or has no value other than such sections."""
    return all(map(_is_empty, value.values())) if isinstance(value, dict) else value in (None, [])
