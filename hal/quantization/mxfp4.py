"""The format of gpt-oss: experts in MXFP4, with ``quant_method`` ``mxfp4`` in config.json.

Source: OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025, and its published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hal.nn import Weight
from hal.nn.linear import IN, OUT
from hal.ops.forms import FLOAT4S
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.float4 import EXPONENTS
from hal.quantization.forms import MXFP4
from hal.quantization.layer_patterns import ExcludedLayers
from hal.quantization.stored_layer import Reader, StoredAs, StoredLayer, Tensors

BYTES = "bytes"


class FusedBlocks(Reader):
    """``gate_up_proj_blocks`` and ``gate_up_proj_scales`` of all experts, and the same for ``down_proj``."""

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        layer, half = stored.layer, {BYTES: MXFP4.columns // FLOAT4S}
        fused = getattr(layer, "fused", None)
        given: dict[str, Any] = {"dtype": torch.uint8, **stored.scales}
        found = {
            "blocks": layer.declare(None, f"{OUT} {IN} {BYTES}", fused=f"{fused}_blocks", sizes=half, **given),
            "exponents": layer.declare(None, f"{OUT} {IN}", fused=f"{fused}_scales", checks=(EXPONENTS,), **given),
        }
        if layer.biased:
            found["bias"] = layer.declare("bias", OUT, fused=f"{fused}_bias", dtype=torch.float32, added=True)
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        blocks, (start, end) = stored["blocks"].flatten(-2), stored.inputs
        if stored.cut:  # Blocks are read whole.
            blocks = blocks[..., start // FLOAT4S : end // FLOAT4S].contiguous()
        scale = stored.of_rank(stored["exponents"])
        return {"weight": blocks, "weight_scale": scale, "bias": stored.tensors.get("bias")}


class ExpertsOnly(ExcludedLayers):
    """MXFP4 of experts that are stored as one tensor, whose parts have the name of their mixture."""

    def stored_as(self, layer: str) -> StoredAs | None:
        return super().stored_as(layer) if layer.endswith(".experts") else None


class Mxfp4(CheckpointFormat):
    """The format of gpt-oss."""

    name = "mxfp4"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        return ExpertsOnly(StoredAs(MXFP4, FusedBlocks()), section.lists("modules_to_not_convert"))
