"""The format of gpt-oss: experts in MXFP4, with ``quant_method`` ``mxfp4`` in config.json.

Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, and its published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from hal.nn import QuantizedLinear, ValueCheck, Weight
from hal.nn.linear import IN, OUT
from hal.nn.low_bits import Mxfp4GroupedLinear
from hal.ops.experts.mxfp4 import FLOAT4S, GROUP
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.excluded_layers import ExcludedLayers
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.scheme import Scheme

BYTES = "bytes"
NOT_A_NUMBER = 255
NUMBERS = ValueCheck(
    lambda values: not bool((values == NOT_A_NUMBER).any()), f"has the exponent {NOT_A_NUMBER}, NaN", AGAIN
)


class FusedBlocks(Representation):
    """``gate_up_proj_blocks`` and ``gate_up_proj_scales`` of all experts, and the same for ``down_proj``."""

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, Mxfp4GroupedLinear)
        groups, half = {IN: GROUP}, {BYTES: GROUP // FLOAT4S}
        found = {
            "blocks": layer.declare(
                None,
                f"{OUT} {IN} {BYTES}",
                fused=f"{layer.fused}_blocks",
                group_sizes=groups,
                sizes=half,
                dtype=torch.uint8,
            ),
            "exponents": layer.declare(
                None,
                f"{OUT} {IN}",
                fused=f"{layer.fused}_scales",
                group_sizes=groups,
                dtype=torch.uint8,
                checks=(NUMBERS,),
            ),
        }
        if layer.has_bias:
            found["bias"] = layer.declare("bias", OUT, fused=f"{layer.fused}_bias", dtype=torch.float32, added=True)
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        return {**stored.tensors, "weight": stored["blocks"].flatten(-2), "weight_scale": stored["exponents"]}


class ExpertsOnly(ExcludedLayers):
    """MXFP4 of experts that are stored as one tensor, whose parts have the name of their mixture."""

    def scheme(self, layer: str) -> Scheme | None:
        return super().scheme(layer) if layer.endswith(".experts") else None


class Mxfp4(CheckpointFormat):
    """The format of gpt-oss."""

    name = "mxfp4"
    representations = MappingProxyType({"mxfp4": FusedBlocks(None)})

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        scheme, _ = self.known()["mxfp4"]
        return ExpertsOnly(scheme, section.lists("modules_to_not_convert"))
