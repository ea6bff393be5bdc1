"""Int4 weights as ModelSlim packs them: ``W4A8_DYNAMIC``.

Source: msModelSlim's documentation of AscendV1, and vllm-ascend's of the same weights, which has the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.nn import Weight
from hal.nn.linear import OUT
from hal.quantization.stored_layer import Reader, StoredLayer, Tensors
from hal.quantization.value_checks import FLOATS, POSITIVE, SYMMETRIC

BITS = 4
COLUMNS = "columns"
ROW_COLUMNS = 16
"""The columns of ``scale_bias`` of a layer that ranks cut by inputs."""
UNPACKED = 1 << 20
"""Numbers that are repacked at once."""


class PackedRows(Reader):
    """``weight`` with two rows in one of int8, ``weight_scale``, ``weight_offset`` and ``scale_bias``.

    Weights in groups have ``weight_scale_second`` and ``weight_offset_second``, too. ``scale_bias`` follows from these.

    Args:
        zero_point: the name of the zero points.
    """

    def __init__(self, zero_point: str) -> None:
        self.zero_point = zero_point

    def declare(self, stored: StoredLayer) -> Mapping[str, Weight]:
        layer, declare = stored.layer, stored.layer.declare
        rows: dict[str, Any] = {"dtype": torch.float32, "stored": FLOATS, "column": True}
        sums: dict[str, Any] = {"dtype": torch.float32, "stored": FLOATS, "optional": True}
        sums["sizes"] = {COLUMNS: ROW_COLUMNS if layer.by_inputs else 1}
        found = {
            "packed": declare("weight", packing={OUT: 2}, dtype=torch.int8),
            "scales": declare("weight_scale", OUT, checks=(POSITIVE,), **rows),
            "offsets": declare(self.zero_point, OUT, optional=True, checks=(SYMMETRIC,), **rows),
            "scale_bias": declare("scale_bias", f"{OUT} {COLUMNS}", **sums),
        }
        if stored.group_size < layer.in_features:
            groups: dict[str, Any] = {"dtype": torch.float32, "stored": FLOATS, **stored.scales}
            found["second_scales"] = declare("weight_scale_second", checks=(POSITIVE,), **groups)
            found["second_offsets"] = declare("weight_offset_second", optional=True, checks=(SYMMETRIC,), **groups)
        return found

    def decode(self, stored: StoredLayer) -> Tensors:
        scale = stored["scales"].unsqueeze(-1)
        second = stored.tensors.get("second_scales")
        return {
            "weight": stored.by_expert(_repacked, stored["packed"]),
            "weight_scale": scale if second is None else scale * stored.of_rank(second),
            "bias": stored.tensors.get("bias"),
        }


def _repacked(packed: Tensor) -> Tensor:
    """Return a weight as :func:`hal.ops.linear` takes it. Some rows after the others, to use less memory.

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
