"""Int4 weights as ModelSlim packs them: ``W4A8_DYNAMIC``.

Source: msModelSlim's documentation of AscendV1, and vllm-ascend's of the same weights, which has the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.nn import QuantizedLinear, Weight
from hal.nn.linear import IN, OUT
from hal.nn.low_bits import WeightOnlyTensors
from hal.quantization.modelslim import ZERO_POINT
from hal.quantization.packed_integers import FLOATS, by_expert
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.value_checks import POSITIVE, SYMMETRIC

BITS = 4
COLUMNS = "columns"
ROW_COLUMNS = 16
"""The columns of ``scale_bias`` of a layer that ranks cut by inputs."""
UNPACKED = 1 << 20
"""Numbers that are repacked at once."""


class PackedRows(Representation):
    """``weight`` with two rows in one of int8, ``weight_scale``, ``weight_offset`` and ``scale_bias``.

    Weights in groups have ``weight_scale_second`` and ``weight_offset_second``, too. The scheme computes the
    sums that ``scale_bias`` has.
    """

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, WeightOnlyTensors)
        rows: dict[str, Any] = {"dtype": torch.float32, "stored": FLOATS, "column": True}
        columns = {COLUMNS: ROW_COLUMNS if layer.by_inputs else 1}
        found = {
            "packed": layer.declare("weight", packing={OUT: 2}, dtype=torch.int8),
            "scales": layer.declare("weight_scale", OUT, checks=(POSITIVE,), **rows),
            "offsets": layer.declare(ZERO_POINT, OUT, optional=True, checks=(SYMMETRIC,), **rows),
            "scale_bias": layer.declare(
                "scale_bias", f"{OUT} {COLUMNS}", sizes=columns, dtype=torch.float32, stored=FLOATS, optional=True
            ),
        }
        if layer.group_size < layer.in_features:
            groups: dict[str, Any] = {"group_sizes": {IN: layer.group_size}, "dtype": torch.float32, "stored": FLOATS}
            found["second_scales"] = layer.declare("weight_scale_second", checks=(POSITIVE,), **groups)
            found["second_offsets"] = layer.declare(
                "weight_offset_second", optional=True, checks=(SYMMETRIC,), **groups
            )
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        scale = stored["scales"].unsqueeze(-1)
        second = stored.tensors.get("second_scales")
        if second is not None:
            scale = scale * second
        return {**stored.tensors, "weight": by_expert(stored, _repacked, stored["packed"]), "weight_scale": scale}


def _repacked(packed: Tensor) -> Tensor:
    """Return a weight as :func:`hal.ops.quant_linear_int4` takes it. Some rows after the others, to use less memory.

    Args:
        packed: int8 ``[out_features / 2, in_features]``. The low four bits are of the even rows.
    """
    half, width = packed.shape
    found = torch.empty(2 * half, width // 2, dtype=torch.uint8)
    step = max(1, UNPACKED // max(1, width))
    for rows, part in zip(found.split(2 * step), packed.view(torch.uint8).split(step), strict=True):
        for row, numbers in enumerate((part & 15, part >> BITS)):
            rows[row::2] = numbers[:, ::2] | numbers[:, 1::2] << BITS
    return found.view(torch.int32)
