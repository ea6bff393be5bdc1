"""The format of ModelSlim: ``quant_model_description.json`` says of each tensor how it is quantised.

Source: msModelSlim's documentation of its weight format (AscendV1), and MindIE's of W8A8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hal.errors import CheckpointError, ConfigError
from hal.quantization.arithmetic import AGAIN, Activation, DynamicLayer, StaticLayer, fold, input_activation
from hal.quantization.description import FLOATS, INTEGERS, SUPPORTED, Quantization, Scheme, TensorSpec, Writer, zeros

FILE = "quant_model_description.json"
_SCHEMES: dict[str, Scheme | None] = {"FLOAT": None, "W8A8": "w8a8", "W8A8_DYNAMIC": "w8a8_dynamic"}
_TYPES: dict[Scheme, str] = {"w8a8": "W8A8", "w8a8_dynamic": "W8A8_DYNAMIC"}
_OTHERS = ("kv_quant_type", "kv_cache_type", "fa_quant_type")
"""Quantisation of the cache and of attention, which must not be asked for."""


class ModelSlim(Quantization):
    """Quantisation by a description of every tensor.

    Args:
        file: the description's name, for errors.
        types: by tensor's name.
    """

    format = "modelslim"
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
            if (value := description.get(key)) not in (None, "", "FLOAT"):
                raise ConfigError(f"{file} says {key} {value!r:.60}, which hal does not read", SUPPORTED)
        return cls(file, description)

    def scheme(self, layer: str) -> Scheme | None:
        name = f"{layer}.weight"
        if name not in self._types:
            raise CheckpointError(f"{self._file} does not say how {name} is quantised", AGAIN)
        found = self._types[name]
        if not isinstance(found, str) or found not in _SCHEMES:
            raise CheckpointError(
                f"{self._file} says {found!r:.60} of {name}, which hal does not read",
                f"it reads {', '.join(_SCHEMES)}: {SUPPORTED}",
            )
        return _SCHEMES[found]

    def tensors(self, scheme: Scheme, rows: int, bias: bool) -> Mapping[str, TensorSpec]:
        one, column, row = ((1,), ()), ((rows, 1), (rows,)), ((rows,), (rows, 1))
        if scheme == "w8a8_dynamic":
            found = {
                "weight_scale": TensorSpec(column),
                "weight_offset": TensorSpec(column, INTEGERS | FLOATS, required=False),
            }
            return {**found, "bias": TensorSpec(row)} if bias else found
        return {
            "input_scale": TensorSpec(one),
            "input_offset": TensorSpec(one, INTEGERS | FLOATS),
            "deq_scale": TensorSpec(row, frozenset({"F32", "BF16", "I64"})),
            "quant_bias": TensorSpec(row, frozenset({"I32"})),
            # The three above say the same, and more exactly.
            "weight_scale": TensorSpec(column, required=False),
            "bias": TensorSpec(row, required=False),
            "weight_offset": TensorSpec(column, INTEGERS | FLOATS, required=False),
        }

    def static_layer(self, name: str, tensors: Mapping[str, Tensor], row_sums: Tensor) -> StaticLayer:
        zeros(name, "weight_offset", tensors.get("weight_offset"))
        activation = input_activation(name, tensors["input_scale"], tensors["input_offset"])
        deq_scale = tensors["deq_scale"].flatten()
        if deq_scale.dtype == torch.int64:
            deq_scale = _from_bits(name, deq_scale)
        return StaticLayer(name, activation, deq_scale.float(), tensors["quant_bias"].flatten().long(), row_sums)

    def dynamic_layer(self, name: str, tensors: Mapping[str, Tensor]) -> DynamicLayer:
        zeros(name, "weight_offset", tensors.get("weight_offset"))
        bias = tensors.get("bias")
        scale = tensors["weight_scale"].flatten().float()
        return DynamicLayer(name, scale, None if bias is None else bias.flatten().float())


class ModelSlimWriter(Writer):
    """Writes what :class:`ModelSlim` reads."""

    symmetric = False

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def layer(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, activation: Activation | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        column = scale.unsqueeze(-1)
        found = {"weight": weight, "weight_scale": column, "weight_offset": torch.zeros_like(column)}
        if activation is None:
            return found if bias is None else {**found, "bias": bias}
        folded = fold("", activation, scale, weight.sum(-1, dtype=torch.int64), bias)
        deq_scale = folded.deq_scale
        if dtype == torch.float16:  # so the kernels for float16 take it: its bits, in 64
            deq_scale = deq_scale.view(torch.int32).long()
        return {
            **found,
            "input_scale": torch.tensor([activation.scale], dtype=dtype),
            "input_offset": torch.tensor([activation.offset], dtype=dtype),
            "deq_scale": deq_scale,
            "quant_bias": folded.quant_bias.to(torch.int32),
        }

    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        types = {name: _TYPES[scheme] if quantised else "FLOAT" for name, quantised in sorted(tensors.items())}
        return {
            "config.json": dict(config),
            FILE: {"model_quant_type": _TYPES[scheme], "version": "1.0.0", **types},
        }


def _from_bits(name: str, values: Tensor) -> Tensor:
    if bool((values < 0).any()) or bool((values >= 1 << 32).any()):
        raise CheckpointError(f"deq_scale of {name} is I64 and holds no bits of float32", AGAIN)
    return values.to(torch.int32).view(torch.float32)
