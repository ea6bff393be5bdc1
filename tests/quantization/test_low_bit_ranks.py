"""Tests of ranks as processes that split weights of 8 and 4 bits: their logits, and the cuts that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import rank_programs
from helpers.low_bits import DENSE, WHOLE, Format, modelslim, pair
from helpers.low_bits_on_ranks import CASES
from helpers.quantized import change_tensors, error
from helpers.ranks import in_ranks
from helpers.thorough import EXHAUSTIVE, MODE, thorough

import hal
from hal.device.group import Group
from hal.errors import CheckpointError, ConfigError
from hal.parallel import Mesh


@thorough(
    EXHAUSTIVE,
    r"\[(?!2-(modelslim-w4a8-32-dense|gptq-ordered-sparse|Q4_1-sparse|mxfp4)"
    r"|4-(mxfp4|awq-dense|modelslim-mixed-sparse)\])",
)
@thorough(MODE, r"\[([24]-mxfp4|2-Q4_1-sparse|4-awq-dense|4-modelslim-mixed-sparse)")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 4])
def test_logits_of_ranks_are_those_of_one(count: int, name: str, tmp_path: Path) -> None:
    """Within float32's rounding, or where ranks round parts of a row to int8, that of int8."""
    case, compilers = CASES[name], ["eager", "graph"]
    on = {"backend": "cpu", "options": {"pack_weights": False}, **case.config}
    arguments = {"checkpoint": str(case.write(tmp_path)), "dtype": "float32", "compilers": compilers, "on": on}
    alone = rank_programs.compiled_logits(**arguments, parallel={})
    for rank in in_ranks("compiled_logits", count, **arguments, parallel={"tensor": count}):
        for compiler in compilers:
            assert error(rank[compiler], alone[compiler]) < (0.03 if case.rounded else 1e-5), compiler
        assert rank["held"] < alone["held"] * (1 / count + 0.1)


def test_cuts_inside_packed_numbers_are_refused(tmp_path: Path) -> None:
    """Ranks may cut inside a group, but each of their groups fills whole elements."""
    made, _ = pair(tmp_path, Format("gptq"), **{**DENSE, "intermediate_size": 72})
    mesh = Mesh(tensor=Group("pair", 1, 2, object()))
    with (
        hal.open({"backend": "cpu", "dtype": "float32"}, mesh=mesh) as backend,
        pytest.raises(ConfigError, match=r"2 ranks cut 72 inputs into groups of 4, .* packed by 8"),
    ):
        hal.load_model(made, backend)


def test_cuts_inside_a_byte_are_refused(tmp_path: Path) -> None:
    """ModelSlim packs two rows into one of bytes."""
    sizes = {**DENSE, "intermediate_size": 72, "num_attention_heads": 8, "num_key_value_heads": 8}
    made, _ = pair(tmp_path, Format(WHOLE, group=0, symmetric=True, activations=True), **sizes)
    modelslim(made, 0)
    mesh = Mesh(tensor=Group("eight", 1, 8, object()))
    with (
        hal.open({"backend": "cpu", "dtype": "float32"}, mesh=mesh) as backend,
        pytest.raises(ConfigError, match=r"gate_up_proj.packed: .* 8 ranks at element 9 .* group of 2") as caught,
    ):
        hal.load_model(made, backend)
    assert caught.value.remedy.endswith("suit all weights of the model: 1, 2, 4")


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_inputs_whose_order_is_missing_are_refused(method: str, tmp_path: Path) -> None:
    """A rank that has some of the inputs could not tell their groups."""
    made, _ = pair(tmp_path, Format(method, ordered=True), **DENSE)
    name = f"model.layers.1.mlp.down_proj.{'g_idx' if method == 'gptq' else 'weight_g_idx'}"
    change_tensors(made, lambda tensors: tensors.pop(name))
    config = {"backend": "cpu", "dtype": "float32", "quantized_weights": "dequantized"}
    for rank in (0, 1):
        mesh = Mesh(tensor=Group("pair", rank, 2, object()))
        with hal.open(config, mesh=mesh) as backend, pytest.raises(CheckpointError, match=f"{name} is missing"):
            hal.load_model(made, backend)


WHOLE_EXPERTS = [name for name in CASES if name == "mxfp4" or name.endswith("-sparse")]


@thorough(EXHAUSTIVE, r"\[(?!modelslim-w4a8-32-sparse|mxfp4)")
@thorough(MODE, r"\[mxfp4")
@pytest.mark.parametrize("name", WHOLE_EXPERTS)
def test_logits_of_ranks_with_whole_experts(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    arguments = {"checkpoint": str(case.write(tmp_path)), "dtype": "float32", "compilers": ["eager"]}
    arguments["on"] = {"backend": "cpu", **case.config}
    alone = rank_programs.compiled_logits(**arguments, parallel={})["eager"]
    for rank in in_ranks("compiled_logits", 2, **arguments, parallel={"tensor": 2, "experts": "all_gather"}):
        assert error(rank["eager"], alone) < (0.03 if case.rounded else 1e-5)
