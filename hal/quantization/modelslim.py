"""The format of ModelSlim: ``quant_model_description.json`` has the quantization type of each tensor.

Its first versions wrote the same table into config.json, as ``quantization_config``.

Source: msModelSlim's documentation of its weight format (AscendV1), and MindIE's of W8A8 and of mixed W4A8. The
documentation of vllm-ascend has the shapes of W4A8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hal.config.untrusted_files import read_json
from hal.errors import CheckpointError, ConfigError
from hal.nn import Weight
from hal.nn.linear import OUT
from hal.ops.forms import Form
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization, Written, supported
from hal.quantization.forms import INT8, INT8_DYNAMIC, INT8_STATIC, in_groups
from hal.quantization.int8_rows import Int8Rows, ModelSlimStatic
from hal.quantization.integer_arithmetic import AGAIN
from hal.quantization.stored_layer import Reader, StoredAs, StoredLayer, Tensors
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


FILE = "quant_model_description.json"
PATTERN = "quant_model_description*.json"
ZERO_POINT = "weight_offset"
"""The tensor of the zero points of a weight."""
INT4 = "W4A8_DYNAMIC"
"""The type of int4 weights, which files of :data:`VERSION` pack."""
INT4_ONLY = "W4A16"
"""The type of int4 weights with floating-point activations, which AscendV1 does not list."""
VERSION = "1.0.0"
_FLOAT = "FLOAT"
_OTHERS = ("kv_quant_type", "kv_cache_type", "fa_quant_type")
"""Keys for quantization of the cache and of attention, which hal does not support."""


_ROWS, _STATIC = Int8Rows(ZERO_POINT, writes_zero_point=True), ModelSlimStatic(ZERO_POINT)
TYPES: Mapping[str, tuple[Form, Reader]] = MappingProxyType(
    {
        INT4: (Form("int4", inputs="int8"), PackedRows(ZERO_POINT)),
        "W8A16": (INT8, _ROWS),
        "W8A8": (INT8_STATIC, _STATIC),
        "W8A8_DYNAMIC": (INT8_DYNAMIC, _ROWS),
    }
)
"""The form of weights, without groups, and what reads them, by type."""


class ModelSlimQuantization(Quantization):
    """Quantization by a type for every tensor.

    Args:
        section: the description, with the file's name or its key in config.json, for errors.
    """

    def __init__(self, section: ConfigSection) -> None:
        self._section = section

    def stored_as(self, layer: str) -> StoredAs | None:
        name, file, types = f"{layer}.weight", self._section.name, self._section.content
        if name not in types:
            raise CheckpointError(f"{file} has no quantization type for {name}", AGAIN)
        found = types[name]
        if found == _FLOAT:
            return None
        if found == INT4_ONLY:
            raise CheckpointError(
                f"{file} has the quantization type {found!r} for {name}, which hal does not support: it is no type of "
                "AscendV1, and msModelSlim does not document how it packs these weights",
                "convert it to AWQ or GPTQ with msModelSlim's example/ms_to_vllm.py, or quantize the original with "
                "W4A8_DYNAMIC or W8A16, or with hal quantize --scheme w4a16",
            )
        if not isinstance(found, str) or found not in TYPES:
            raise CheckpointError(
                f"{file} has the quantization type {found!r:.60} for {name}, which hal does not support",
                f"use one of {', '.join((_FLOAT, *TYPES))}: {supported()}",
            )
        if found == INT4 and types.get("version") != VERSION:
            raise CheckpointError(
                f"{file} has the version {types.get('version')!r:.60}, in which hal does not read {found} for {name}",
                f"quantize it with a msModelSlim that writes the version {VERSION}",
            )
        form, reader = TYPES[found]
        # Types without groups have no use for their size, which is 0 where no type has groups.
        grouped = in_groups(form, {"group_size": types.get("group_size") or -1}) if found == INT4 else form
        return StoredAs(grouped, reader)

    def exclusion(self, layer: str) -> str:
        return f"{_FLOAT!r} in {self._section.name}"

    def states_dtype(self, layer: str) -> bool:
        return f"{layer}.weight" in self._section.content


class ModelSlim(CheckpointFormat):
    """The format of ModelSlim."""

    name = "modelslim"
    config_keys = ("quantize",)
    writers = MappingProxyType({"w8a16": _ROWS, "w8a8": _STATIC, "w8a8_dynamic": _ROWS})

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        files = sorted(folder.glob(PATTERN))
        if len(files) > 1:
            raise CheckpointError(
                f"{folder} holds {len(files)} quantization descriptions: {', '.join(file.name for file in files)}",
                "remove all but one",
            )
        if files:
            found = ConfigSection(files[0].name, read_json(files[0]))
            if section is not None and section.content != found.content:
                raise CheckpointError(
                    f"{folder} describes its quantization twice, in config.json and in {found.name}",
                    "remove one of the descriptions",
                )
        elif section is not None and any(name.endswith(".weight") for name in section.content):
            found = section
        else:
            return None
        for key in _OTHERS:
            if (value := found.content.get(key)) not in (None, "", _FLOAT):
                raise ConfigError(f"{found.name} has {key} {value!r:.60}, which hal does not support", supported())
        return ModelSlimQuantization(found)

    def describe(
        self, config: Mapping[str, Any], written: Written, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        if written.others:
            raise ConfigError(
                f"hal writes one scheme in the format {self.name}, and {next(iter(written.others))} has another",
                "use --format compressed-tensors",
            )
        kind = written.scheme.upper()
        types = {name: kind if quantized else _FLOAT for name, quantized in sorted(tensors.items())}
        return {"config.json": dict(config), FILE: {"model_quant_type": kind, "version": VERSION, **types}}
