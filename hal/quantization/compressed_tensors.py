"""compressed-tensors, the format of llm-compressor: ``quantization_config`` in config.json says which layers, and how.

Source: the documentation of compressed-tensors; ``int-quantized`` with W8A8 as vLLM reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError, ConfigError
from hal.quantization.arithmetic import AGAIN, Activation, DynamicLayer, StaticLayer, fold, input_activation
from hal.quantization.description import FLOATS, INTEGERS, SUPPORTED, Quantization, Scheme, TensorSpec, Writer, zeros
from hal.quantization.layer_patterns import LayerPattern

_WHERE = "quantization_config in config.json"
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
# What a key means where it is left out. A type, a number of bits and a strategy must be said.
_DEFAULTS = {"symmetric": True, "dynamic": False}
_UNSET = ("group_size", "block_structure", "actorder")
"""Keys of weights and activations that must be absent or null."""


@attrs.frozen
class Matcher:
    """Layers, by exact name, by ``re:`` and a regular expression that matches from the start, or as ``Linear``."""

    names: frozenset[str]
    patterns: tuple[LayerPattern, ...]
    every: bool

    @classmethod
    def of(cls, entries: object, where: str) -> Matcher:
        """Read a list of them.

        Raises:
            CheckpointError: it is none, or an expression in it is not one of Python's.
            ConfigError: an expression is one that hal does not read.
        """
        if not isinstance(entries, list) or not all(isinstance(each, str) for each in entries):
            raise CheckpointError(f"{where} of {_WHERE} is {entries!r:.60}, no list of names", AGAIN)
        try:
            patterns = tuple(LayerPattern(each.removeprefix("re:")) for each in entries if each.startswith("re:"))
        except ConfigError as error:
            raise ConfigError(f"{where} of {_WHERE}: {error.problem}", error.remedy) from None
        except (re.error, OverflowError, ValueError) as error:  # the latter two for numbers of repeats
            raise CheckpointError(f"{where} of {_WHERE} holds a bad regular expression: {error}", AGAIN) from None
        return cls(frozenset(each for each in entries if not each.startswith("re:")), patterns, "Linear" in entries)

    def names_layer(self, layer: str) -> bool:
        """Whether a name or an expression takes it, not only its being linear."""
        return layer in self.names or any(pattern.match(layer) for pattern in self.patterns)


class CompressedTensors(Quantization):
    """Quantisation by ``quantization_config``.

    Args:
        groups: each scheme, and the layers that it is for. What names a layer goes before what takes all linear ones.
        ignore: the layers that are not quantised.
    """

    format = "compressed-tensors"

    def __init__(self, groups: Sequence[tuple[Scheme, Matcher]], ignore: Matcher) -> None:
        self._groups = tuple(groups)
        self._ignore = ignore

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> CompressedTensors:
        """Read ``quantization_config``.

        Raises:
            ConfigError: something in it is not what hal reads.
            CheckpointError: it is damaged.
        """
        _only("format", section.get("format"), ("int-quantized",))
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            value = section.get(key)
            if value and value != {"format": "dense"}:
                raise ConfigError(f"{_WHERE} has a {key}, {value!r:.80}, which hal does not read", SUPPORTED)
        groups = section.get("config_groups")
        if not isinstance(groups, dict) or not groups or not all(isinstance(each, dict) for each in groups.values()):
            raise CheckpointError(f"{_WHERE} has no config_groups", AGAIN)
        read = [(_scheme(group, name), Matcher.of(group.get("targets"), "targets")) for name, group in groups.items()]
        return cls(read, Matcher.of(section.get("ignore") or [], "ignore"))

    def scheme(self, layer: str) -> Scheme | None:
        if self._ignore.every or self._ignore.names_layer(layer):
            return None
        named = [scheme for scheme, targets in self._groups if targets.names_layer(layer)]
        of_all = [scheme for scheme, targets in self._groups if targets.every]
        return next(iter([*named, *of_all]), None)

    def tensors(self, scheme: Scheme, rows: int, bias: bool) -> Mapping[str, TensorSpec]:
        one = ((1,), ())
        found = {
            "weight_scale": TensorSpec(((rows, 1), (rows,))),
            "weight_zero_point": TensorSpec(((rows, 1), (rows,)), INTEGERS | FLOATS, required=False),
        }
        if bias:
            found["bias"] = TensorSpec(((rows,),))
        if scheme == "w8a8":
            found["input_scale"] = TensorSpec(one)
            found["input_zero_point"] = TensorSpec(one, INTEGERS | FLOATS, required=False)
        return found

    def static_layer(self, name: str, tensors: Mapping[str, Tensor], row_sums: Tensor) -> StaticLayer:
        zeros(name, "weight_zero_point", tensors.get("weight_zero_point"))
        activation = input_activation(name, tensors["input_scale"], tensors.get("input_zero_point"))
        return fold(name, activation, tensors["weight_scale"].flatten(), row_sums, tensors.get("bias"))

    def dynamic_layer(self, name: str, tensors: Mapping[str, Tensor]) -> DynamicLayer:
        zeros(name, "weight_zero_point", tensors.get("weight_zero_point"))
        bias = tensors.get("bias")
        scale = tensors["weight_scale"].flatten().float()
        return DynamicLayer(name, scale, None if bias is None else bias.float())


class CompressedTensorsWriter(Writer):
    """Writes what :class:`CompressedTensors` reads."""

    symmetric = True

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def layer(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, activation: Activation | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        found = {"weight": weight, "weight_scale": scale.unsqueeze(-1)}
        if bias is not None:
            found["bias"] = bias
        if activation is not None:
            found["input_scale"] = torch.tensor([activation.scale], dtype=torch.float32)
            if activation.offset:
                found["input_zero_point"] = torch.tensor([activation.offset], dtype=torch.int8)
        return found

    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        unset = dict.fromkeys((*_UNSET, "observer"))
        activations = _DYNAMIC if scheme == "w8a8_dynamic" else {**_STATIC, "symmetric": self.symmetric}
        group = {
            "targets": ["Linear"],
            "weights": {**_WEIGHTS, **unset},
            "input_activations": {**activations, **unset},
            "output_activations": None,
        }
        section = {
            "quant_method": CompressedTensors.format,
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(kept),
            "kv_cache_scheme": None,
        }
        return {"config.json": {**config, "quantization_config": section}}


def _scheme(group: Mapping[str, Any], name: str) -> Scheme:
    if group.get("format") is not None:
        _only(f"the format of {name}", group["format"], ("int-quantized",))
    if group.get("output_activations"):
        raise ConfigError(f"{_WHERE} quantises output_activations in {name}, which hal does not do", SUPPORTED)
    _require(group.get("weights"), _WEIGHTS, f"weights of {name}")
    activations = group.get("input_activations")
    dynamic = isinstance(activations, dict) and activations.get("dynamic") not in (None, False)
    _require(activations, _DYNAMIC if dynamic else _STATIC, f"input_activations of {name}")
    return "w8a8_dynamic" if dynamic else "w8a8"


def _require(found: object, wanted: Mapping[str, object], where: str) -> None:
    if not isinstance(found, dict):
        raise ConfigError(f"{_WHERE} has no {where}", SUPPORTED)
    for key, value in wanted.items():
        _only(f"{key} of the {where}", found.get(key, _DEFAULTS.get(key)), (value,))
    for key in _UNSET:
        if found.get(key) is not None:
            raise ConfigError(f"{_WHERE} has {key} {found[key]!r:.60} in the {where}", SUPPORTED)


def _only(what: str, found: object, wanted: tuple[object, ...]) -> None:
    if not any(found == each and type(found) is type(each) for each in wanted):
        raise ConfigError(f"{what} in {_WHERE} is {found!r:.60}, not {wanted[0]!r}", SUPPORTED)
