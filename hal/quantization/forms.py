"""The named compositions of forms, such as ``w8a8_dynamic``, and forms from what descriptions say of weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import attrs

from hal.errors import ConfigError
from hal.ops.forms import INT4S, Form

INT8, INT8_DYNAMIC, INT8_STATIC = Form("int8"), Form("int8", inputs="int8"), Form("int8", inputs="static_int8")
MXFP4, MXFP8 = (Form(numbers, columns=32, scales="e8m0") for numbers in ("float4", "float8"))
NVFP4 = Form("float4", columns=16, scales="e4m3", second=True)
NAMES: Final[Mapping[str, tuple[Form, str]]] = MappingProxyType(
    {
        "fp8": (Form("float8"), "float8 weights with a scale for each block, output channel or tensor"),
        "fp8_dynamic": (Form("float8", inputs="float8"), "float8 weights as fp8, and float8 activations, by token"),
        "fp8_static": (Form("float8", inputs="static_float8"), "float8 weights as fp8, and float8 activations, static"),
        "mxfp4": (MXFP4, "float4 weights with a power of two as the scale of 32 inputs"),
        "nvfp4": (NVFP4, "float4 weights with a float8 scale for 16 inputs, and a second scale for each tensor"),
        "w4a16": (
            Form("int4"),
            "int4 weights with a scale, and perhaps a zero point, for each group of inputs or output channel",
        ),
        "w4a8_dynamic": (
            Form("int4", inputs="int8"),
            "symmetric int4 weights as w4a16, and int8 activations, dynamic per token",
        ),
        "w8a16": (INT8, "int8 weights with a scale for each output channel, and floating-point activations"),
        "w8a16_group": (INT8, "int8 weights with the same scales and zero points as w4a16"),
        "w8a8": (INT8_STATIC, "int8 weights as w8a16, and int8 activations, static per tensor"),
        "w8a8_dynamic": (INT8_DYNAMIC, "int8 weights as w8a16, and int8 activations, dynamic per token"),
    }
)
"""The form of each name, with one scale for each row, and a phrase that describes it."""
GROUPED = ("w4a16", "w4a8_dynamic", "w8a16_group")
"""Names of forms whose scales may cover groups of inputs."""


def name_of(form: Form) -> str:
    """Return the name of a form, whatever its scales cover; that of its numbers if it has none."""
    if form.numbers == "int8" and form.inputs == "float":
        return "w8a16" if form.by_row and not form.zero_points else "w8a16_group"
    alike = (name for name, (each, _) in NAMES.items() if (each.numbers, each.inputs) == (form.numbers, form.inputs))
    return next(alike, form.numbers)


def in_groups(form: Form, settings: Mapping[str, Any]) -> Form:
    """Return a form of integers with the groups, zero points and order that a description states.

    One group per row is the strategy ``channel``, or without a strategy, a size of -1 or None.

    Args:
        form: the form without groups.
        settings: ``strategy``, ``group_size``, ``symmetric`` and ``actorder``, not validated.

    Raises:
        ConfigError: hal does not support them.
    """
    size, symmetric = settings.get("group_size"), settings.get("symmetric", True)
    strategy, grouped = settings.get("strategy"), size not in (None, -1)
    if strategy not in (None, "group" if grouped else "channel"):
        raise ConfigError(
            f"the strategy of quantized weights is {strategy!r:.60} with the group_size {size!r:.60}",
            "use the strategy channel, or group with a group_size",
        )
    if grouped and (type(size) is not int or size < 1):
        raise ConfigError(f"the group_size of quantized weights is {size!r:.60}", "make it positive, or -1")
    if type(symmetric) is not bool:
        raise ConfigError(f"symmetric of quantized weights is {symmetric!r:.60}", "make it true or false")
    ordered = grouped and settings.get("actorder") == "group"
    columns: int = size if grouped else 0  # type: ignore[assignment]
    return attrs.evolve(form, columns=columns, zero_points=not symmetric, ordered=ordered)


def in_blocks(settings: Mapping[str, Any]) -> Form:
    """Return the form of float8 weights for ``strategy`` and ``block_structure`` of a description.

    A scale of a whole tensor of the checkpoint becomes one of each row: a layer may merge several tensors.

    Raises:
        ConfigError: hal does not support them.
    """
    strategy, block = settings.get("strategy"), settings.get("block_structure")
    if strategy not in ("block", "channel", "tensor"):
        raise ConfigError(f"the strategy of float8 weights is {strategy!r:.60}", "use block, channel or tensor")
    if strategy != "block" and block is None:
        return Form("float8")
    if strategy != "block":
        problem = f"float8 weights have the strategy {strategy!r} and blocks of {block!r:.60}"
        raise ConfigError(problem, "use the strategy block, or set block_structure to null")
    if not (isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)):
        raise ConfigError(f"the blocks of float8 weights are {block!r:.60}", "use two positive sizes: [128, 128]")
    return Form("float8", rows=block[0], columns=block[1])


def check_width(form: Form, in_features: int) -> None:
    """Raise ConfigError unless rows of so many numbers, and their groups, can be kept in the form."""
    if form.numbers == "float4" and in_features % form.columns:
        raise ConfigError(
            f"a layer has {in_features} inputs, not a multiple of {form.columns}", "load the unquantized checkpoint"
        )
    size = form.group(in_features)
    if form.numbers == "int4" and (in_features % INT4S or size % INT4S):
        raise ConfigError(
            f"a layer has {in_features} inputs in groups of {size}, and hal packs {INT4S} of 4 bits",
            f"quantize it in groups of a multiple of {INT4S}, or exclude it in the quantization config",
        )
