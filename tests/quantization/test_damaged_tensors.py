"""Tests that each format refuses damaged tensors by name, before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.low_bits import DENSE, SPARSE, WHOLE, Format, gpt_oss_pair, modelslim, pair, stacked_pair
from helpers.quantized import make_pair
from helpers.thorough import FAMILY, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.device.group import Group
from hal.errors import CheckpointError
from hal.parallel import Mesh

DOWN = "model.layers.1.mlp.down_proj."
EXPERT = "model.layers.1.mlp.experts.2.down_proj."
FUSED = "model.layers.1.mlp.experts.down_proj"
NO_SCALES = (math.inf, math.nan, 0.0, -1.0)
POSITIVE = "has values that are not positive and finite"
NO_ROW_SCALES = (math.inf, math.nan, -1.0)
NOT_NEGATIVE = "has values that are negative or not finite"
ASYMMETRIC = "has values other than 0, so its weights are asymmetric"
COMPRESSED = "compressed-tensors"
Fault = tuple[tuple[float, ...], str]
"""Values for the first element, and the error."""
SCALE: Fault = (NO_SCALES, POSITIVE)
ROW_SCALE: Fault = (NO_ROW_SCALES, NOT_NEGATIVE)
ZERO: Fault = ((1,), ASYMMETRIC)
VALID: Fault = ((), "")
"""For weights, whose numbers are checked as they are read, and for zero points that have no invalid value."""
INDEX: Fault = ((4, -1), r"has groups other than 0 to \d")
SIZES: Fault = ((1,), "has groups of other sizes than 32")


@attrs.frozen
class Kind:
    """Checkpoints of a format, and the tensors of one of their layers.

    Attributes:
        make: writes one into a folder, and returns its path.
        tensors: what is wrong with values of each tensor, by the last part of its name.
        layer: the first part of their names.
        optional: the tensors that a checkpoint may lack.
    """

    make: Callable[[Path], Path]
    tensors: Mapping[str, tuple[Fault, ...]]
    layer: str = DOWN
    optional: tuple[str, ...] = ()


def low_bits(format: Format, **tensors: tuple[Fault, ...]) -> Kind:
    optional = ("weight_shape",) if format.ordered else ("g_idx", "weight_shape")
    return Kind(lambda folder: pair(folder, format, **DENSE)[0], tensors, optional=optional)


def experts(kind: Kind, format: Format) -> Kind:
    """Return the same of an expert."""
    return attrs.evolve(kind, make=lambda folder: pair(folder, format, **SPARSE)[0], layer=EXPERT)


def rows(format: Any, scheme: Any, **tensors: tuple[Fault, ...]) -> Kind:
    return Kind(lambda folder: make_pair(folder, format, scheme).folder, tensors, optional=("weight_offset",))


def slim(group: int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        quantized, _ = pair(folder, Format(WHOLE, group=group, symmetric=True, activations=True), **DENSE)
        modelslim(quantized, group)
        return quantized

    return make


FOUR = "has values other than integers from -8 to 7"
PACKED = Format(COMPRESSED)
AWQ, GPTQ = Format("awq"), Format("gptq")
GPTQ_TENSORS: dict[str, tuple[Fault, ...]] = {"qweight": (VALID,), "scales": (SCALE,), "g_idx": (INDEX, SIZES)}
OFFSET: Fault = ((0.5, 200.0, -129.0, math.nan), "has values other than integers from -128 to 127")
KINDS = {
    "packed": low_bits(
        attrs.evolve(PACKED, ordered=True),
        weight_packed=(VALID,),
        weight_zero_point=(VALID,),
        weight_scale=(SCALE,),
        weight_shape=(((65,), r"has a shape other than \[64, 128\]"),),
        weight_g_idx=(INDEX,),
    ),
    "whole, 8 bits": low_bits(Format(WHOLE, bits=8, symmetric=True), weight=(VALID,), weight_scale=(SCALE,)),
    "whole, 4 bits": low_bits(
        Format(WHOLE, group=64), weight=(VALID,), weight_zero_point=(((8, -9), FOUR),), weight_scale=(SCALE,)
    ),
    "awq": low_bits(AWQ, qweight=(VALID,), qzeros=(VALID,), scales=(SCALE,)),
    "gptq": low_bits(GPTQ, qzeros=(VALID,), **GPTQ_TENSORS),
    "gptq_v2": low_bits(Format("gptq_v2"), qzeros=(VALID,), **GPTQ_TENSORS),
    "fp8 blocks": low_bits(Format("fp8"), weight=(VALID,), weight_scale_inv=(SCALE,)),
    "fp8 tensors": low_bits(Format("fp8", group=-1), weight=(VALID,), weight_scale=(SCALE,)),
    "compressed fp8 rows": low_bits(Format("compressed-fp8", group=0), weight=(VALID,), weight_scale=(SCALE,)),
    "compressed fp8 blocks": low_bits(Format("compressed-fp8"), weight=(VALID,), weight_scale=(SCALE,)),
    "compressed fp8 tensors": low_bits(Format("compressed-fp8", group=-1), weight=(VALID,), weight_scale=(SCALE,)),
    "nvfp4": low_bits(
        Format("nvfp4-pack-quantized"),
        weight_packed=(VALID,),
        weight_scale=((NO_ROW_SCALES[1:], NOT_NEGATIVE),),  # torch rounds infinity to 448
        weight_global_scale=(SCALE,),
    ),
    "packed mxfp4": low_bits(
        Format("mxfp4-pack-quantized"), weight_packed=(VALID,), weight_scale=(((255,), "has the exponent 255, NaN"),)
    ),
    "fp8 experts in one": Kind(
        lambda folder: stacked_pair(folder)[0], {"": (VALID,), "_scale_inv": (SCALE,)}, layer=FUSED, optional=("",)
    ),
    "mxfp4": Kind(
        lambda folder: gpt_oss_pair(folder)[0],
        {"_blocks": (VALID,), "_scales": (((255,), "has the exponent 255, NaN"),)},
        layer=FUSED,
    ),
    "int8 rows": rows(COMPRESSED, "w8a8_dynamic", weight=(VALID,), weight_scale=(ROW_SCALE,)),
    "static int8": rows(COMPRESSED, "w8a8", weight=(VALID,), weight_scale=(ROW_SCALE,), input_scale=(SCALE,)),
    "ModelSlim W8A16": rows("modelslim", "w8a16", weight=(VALID,), weight_scale=(ROW_SCALE,), weight_offset=(ZERO,)),
    "ModelSlim W8A8": rows(
        "modelslim",
        "w8a8",
        weight=(VALID,),
        deq_scale=(ROW_SCALE,),
        quant_bias=(VALID,),
        input_scale=(SCALE,),
        input_offset=(OFFSET,),
        weight_offset=(ZERO,),
    ),
    "ModelSlim W4A8": Kind(
        slim(32),
        {
            "weight": (VALID,),
            "weight_scale": (SCALE,),
            "weight_scale_second": (SCALE,),
            "weight_offset": (ZERO,),
        },
        optional=("weight_offset",),
    ),
}
KINDS["experts, packed"] = experts(
    low_bits(PACKED, weight_packed=(VALID,), weight_zero_point=(VALID,), weight_scale=(SCALE,)), PACKED
)
KINDS["experts, gptq"] = experts(KINDS["gptq"], GPTQ)
KINDS["experts, awq"] = experts(KINDS["awq"], AWQ)


@thorough(FAMILY, r"\[(experts, (gptq|awq)|compressed fp8 (blocks|tensors)|gptq_v2)\]")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_damaged_tensors_are_named_before_weights_are_read(kind: Kind, tmp_path: Path) -> None:
    """Test missing ones, ones of another dtype or shape, and invalid values."""
    folder, read = kind.make(tmp_path), list[int]()
    whole = load_file(folder / "model.safetensors")

    def refused(name: str, changed: Tensor | None, problem: str) -> None:
        kept = {each: tensor for each, tensor in whole.items() if each != name}
        save_file(kept if changed is None else {**kept, name: changed}, folder / "model.safetensors")
        with hal.open("cpu") as backend, pytest.raises(CheckpointError, match=f"{name} {problem}"):
            hal.load_model(folder, backend, progress=lambda done, total: read.append(done))
        assert not read, problem

    for suffix, faults in kind.tensors.items():
        name = f"{kind.layer}{suffix}"
        found = whole[name]
        if suffix not in kind.optional:
            refused(name, None, "is missing")
        refused(name, torch.zeros(found.shape, dtype=torch.float8_e5m2), "is F8_E5M2, expected")
        refused(name, torch.cat((found.view(1, -1), found.view(1, -1))), r"is \[2, ")
        for values, problem in faults:
            for value in values:
                changed = found.clone()
                changed.view(-1)[0] = value
                refused(name, changed, problem)


def test_a_fault_in_the_part_of_another_rank_is_left_to_it(tmp_path: Path) -> None:
    """Test that a rank checks what it reads."""
    quantized, _ = pair(tmp_path, AWQ, **DENSE)
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{DOWN}scales"][-1] = math.inf
    save_file(tensors, quantized / "model.safetensors")
    for rank in range(2):
        with hal.open("cpu", mesh=Mesh(tensor=Group("ranks", rank, 2, object()))) as backend:
            if rank:
                with pytest.raises(CheckpointError, match=f"{DOWN}scales {POSITIVE}"):
                    hal.load_model(quantized, backend)
            else:
                hal.load_model(quantized, backend)


@pytest.mark.parametrize("kind", ["int8 rows", "static int8", "ModelSlim W8A16", "ModelSlim W8A8"])
def test_a_row_with_the_scale_0_must_be_zeros(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind].make(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{DOWN}{'deq_scale' if kind.endswith('W8A8') else 'weight_scale'}"].view(-1)[0] = 0
    save_file(tensors, file)
    with hal.open("cpu") as backend:
        with pytest.raises(CheckpointError, match=f"a row of {DOWN[:-1]} has the scale 0, and other numbers"):
            hal.load_model(folder, backend)
        tensors[f"{DOWN}weight"][0] = 0
        save_file(tensors, file)
        hal.load_model(folder, backend)
