"""The format of GPTQ: integers packed along the inputs, with ``quant_method`` ``gptq`` in config.json.

Source: the documentation of GPTQModel; version 1 stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch

from hal.errors import CheckpointError, ConfigError
from hal.nn import QuantizedLinear, Weight
from hal.nn.linear import IN, OUT
from hal.nn.low_bits import WeightOnlyTensors
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.excluded_layers import ExcludedLayers
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.layer_patterns import LayerPattern, other_names
from hal.quantization.packed_integers import (
    FLOATS,
    by_expert,
    in_groups,
    in_one,
    input_groups,
    signed_weight,
    signed_zero_points,
    transposed,
    unsigned,
)
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.scheme import Scheme
from hal.quantization.value_checks import POSITIVE, group_index

VERSIONS = ("gptq", "gptq_v2")
SCHEMES = {4: "w4a16", 8: "w8a16_group"}


class GptqTensors(Representation):
    """``qweight``, ``qzeros``, ``scales`` and ``g_idx``."""

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, WeightOnlyTensors)
        axes, packed = f"{IN} {OUT}", in_one(layer.bits)
        if layer.in_features % packed:
            raise ConfigError(
                f"a layer has {layer.in_features} inputs, and GPTQ packs {packed} of {layer.bits} bits into a number",
                "exclude the layer when you quantize",
            )
        groups: dict[str, Any] = {
            "group_sizes": {IN: layer.group_size},
            "every_rank": layer.any_groups and layer.shard == IN,
        }
        zero: dict[str, Any] = {"packing": {OUT: packed}, "dtype": torch.int32}
        index: dict[str, Any] = {
            "optional": not layer.ordered,
            "dtype": torch.int32,
            "stored": (torch.int32, torch.int64),
        }
        return {
            "qweight": layer.declare("qweight", axes, packing={IN: packed}, dtype=torch.int32),
            "qzeros": layer.declare("qzeros", axes, **groups, **zero),
            "scales": layer.declare("scales", axes, stored=FLOATS, checks=(POSITIVE,), **groups),
            "g_idx": layer.declare("g_idx", IN, every_rank=not layer.any_groups, checks=group_index(layer), **index),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        layer = stored.layer
        assert isinstance(layer, WeightOnlyTensors)
        bits, scale = layer.bits, by_expert(stored, transposed, stored["scales"])
        inputs = input_groups(stored, "g_idx", "g_idx")
        packed = by_expert(stored, transposed, stored["qweight"])
        zero = by_expert(stored, lambda each: transposed(unsigned(each, bits).to(torch.uint8)), stored["qzeros"])
        # Version 1 stores the largest number for 0. Some of its files with symmetric weights store the middle as it is.
        as_it_is = layer.symmetric and bool((zero == 1 << bits - 1).all())
        if self.description == VERSIONS[0] and not as_it_is:
            zero = zero + 1 & (1 << bits) - 1
        weight = signed_weight(packed, bits, packed.shape[-1] * in_one(bits))
        return {
            **stored.tensors,
            "weight": in_groups(stored, weight, inputs["input_order"]),
            "weight_scale": scale,
            "weight_zero_point": signed_zero_points(zero, bits),
            **inputs,
        }


@attrs.frozen
class LayerRule:
    """A rule of ``dynamic`` for the layers that a regular expression matches.

    Attributes:
        pattern: the expression.
        where: what errors call it.
        scheme: returns the scheme; None if the layers are not quantized.
    """

    pattern: LayerPattern
    where: str
    scheme: Callable[[], Scheme] | None


class GptqQuantization(ExcludedLayers):
    """A scheme, and others for the layers of rules. The first rule that matches a layer applies.

    Args:
        scheme: the scheme of the other layers.
        lists: see :class:`ExcludedLayers`.
        rules: the rules.
    """

    def __init__(self, scheme: Scheme, lists: Mapping[str, object], rules: Sequence[LayerRule]) -> None:
        super().__init__(scheme, lists)
        self._rules = tuple(rules)

    def scheme(self, layer: str) -> Scheme | None:
        found, rule = super().scheme(layer), self._rule(layer)
        if found is None or rule is None:
            return found
        return None if rule.scheme is None else rule.scheme()

    def exclusion(self, layer: str) -> str:
        rule = self._rule(layer)
        return super().exclusion(layer) if rule is None else self.excludes(layer) or rule.where

    def _rule(self, layer: str) -> LayerRule | None:
        """Return the rule for a layer. One that excludes layers must match the name that the checkpoint has."""
        for name in (layer, *other_names(layer)):
            for rule in self._rules:
                if (rule.scheme is not None or name == layer) and rule.pattern.match(name):
                    return rule
        return None


class Gptq(CheckpointFormat):
    """The format of GPTQ, in its first version."""

    name = "gptq"
    representations = MappingProxyType(dict.fromkeys(SCHEMES.values(), GptqTensors(VERSIONS[0])))

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != "gptq":
            return None
        version = _version(section)
        if version not in VERSIONS:
            raise ConfigError(
                f"{section.name} has the checkpoint_format {version!r:.60}, which hal does not support",
                f"use a checkpoint in {' or '.join(VERSIONS)}",
            )
        if version != self.version:
            return None
        if (rotation := section.value("rotation")) is not None:
            problem = f"{section.name} has the rotation {rotation!r:.60}, which hal does not support"
            raise ConfigError(problem, "use a checkpoint that was quantized without rotation")
        return GptqQuantization(self._scheme(section), section.lists("modules_to_not_convert"), [*self._rules(section)])

    def _scheme(self, section: ConfigSection) -> Scheme:
        bits = section.value("bits")
        if type(bits) is not int or bits not in SCHEMES:
            raise ConfigError(
                f"{section.name} has weights of {bits!r:.60} bits, which hal does not support", "use 4 or 8 bits"
            )
        # Without sym, the stored zero points say whether weights are symmetric.
        settings = {"group_size": section.value("group_size"), "symmetric": section.value("sym", default=False)}
        settings["actorder"] = "group" if section.value("desc_act") else None
        return self.known()[SCHEMES[bits]][0].configured(settings)

    def _rules(self, section: ConfigSection) -> Iterator[LayerRule]:
        dynamic = section.value("dynamic", default={}) or {}
        if not isinstance(dynamic, dict):
            raise CheckpointError(f"dynamic of {section.name} is {dynamic!r:.60}, not a table of rules", AGAIN)
        for key, changes in dynamic.items():
            where = f"{key!r:.80} in dynamic of {section.name}"
            pattern = LayerPattern(key.removeprefix("-:").removeprefix("+:"), f"dynamic of {section.name}")
            if key.startswith("-:"):
                yield LayerRule(pattern, where, None)
                continue
            if not isinstance(changes, dict):
                raise CheckpointError(f"the rule {where} is {changes!r:.60}, not a table", AGAIN)
            own = ConfigSection(f"the rule {where}", {**section.content, **changes})
            if (version := _version(attrs.evolve(own, content=changes), self.version)) != self.version:
                problem = f"{own.name} has another checkpoint_format, {version!r:.60}"
                raise ConfigError(problem, "use a checkpoint whose layers are stored alike")
            yield LayerRule(pattern, where, partial(self._scheme, own))

    @property
    def version(self) -> str:
        """The version that it reads."""
        found: str = self.representations["w4a16"].description
        return found


class GptqV2(Gptq):
    """The format of GPTQ in its second version, with unchanged zero points."""

    name = "gptq_v2"
    representations = MappingProxyType(dict.fromkeys(SCHEMES.values(), GptqTensors(VERSIONS[1])))


def _version(section: ConfigSection, default: str = VERSIONS[0]) -> Any:
    return section.value("checkpoint_format", "format", default=default)
