"""Tests that what a description says of a checkpoint is compared with its tensors, which say what is quantized."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.low_bits import DENSE, SPARSE, WHOLE, Format, gpt_oss_pair, packed, pair
from helpers.quantized import (
    DESCRIPTION,
    DOWN,
    QUERY,
    SCHEMES,
    Scheme,
    change_json,
    change_tensors,
    config,
    error,
    group,
    kept_layers,
    load,
    logits,
    make_pair,
)
from helpers.thorough import MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

from hal.errors import CheckpointError, ConfigError
from hal.nn import Linear

COMPRESSED = "compressed-tensors"
FIRST = "model.layers.0."
WHERE = r"quantization_config in config\.json"


def replaced(folder: Path, end: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change all tensors whose names have an end."""

    def run(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: change(each).contiguous() for name, each in tensors.items() if name.endswith(end)})

    change_tensors(folder, run)


def filled(value: int, bits: int = 4) -> Callable[[Tensor], Tensor]:
    """Return a function that packs the same number everywhere."""
    return lambda each: packed(torch.full((*each.shape[:-1], each.shape[-1] * 32 // bits), value), bits)


def restored(quantized: Path, plain: Path, *starts: str) -> None:
    """Store layers of a quantized checkpoint in floating point, all of whose names begin with one of some starts."""
    wide = load_file(plain / "model.safetensors")
    kept = {
        name: each for name, each in load_file(quantized / "model.safetensors").items() if not name.startswith(starts)
    }
    save_file(
        kept | {name: each for name, each in wide.items() if name.startswith(starts)}, quantized / "model.safetensors"
    )


def quantized_paths(folder: Path) -> set[str]:
    return set(kept_layers(load(folder)))


# Zero points.


@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("format", "end", "value"),
    [
        (Format("gptq", symmetric=True), "qzeros", 8),
        (Format("gptq", bits=8, group=0, symmetric=True), "qzeros", 128),
        (Format("awq", symmetric=True), "qzeros", 8),
        (Format(COMPRESSED, symmetric=True), None, 8),
    ],
    ids=["gptq", "gptq-8-bits", "awq", "packed"],
)
def test_symmetric_weights_have_the_middle_as_zero_point(
    format: Format, end: str | None, value: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Some files of the first version of GPTQ store it as the second does; compressed-tensors may leave it out."""
    quantized, plain = pair(tmp_path, format, **overrides)
    if end is not None:
        replaced(quantized, end, filled(value, format.bits))
    else:

        def add(tensors: dict[str, Tensor]) -> None:
            for name in [each for each in tensors if each.endswith("weight_scale")]:
                rows, groups = tensors[name].shape
                numbers = packed(torch.full((groups, rows), value), format.bits).t()
                tensors[name.replace("_scale", "_zero_point")] = numbers.contiguous()

        change_tensors(quantized, add)
    if format.method == "awq":
        config(zero_point=False)(quantized)
    assert error(logits(load(quantized)), logits(load(plain))) < 1e-5


@pytest.mark.parametrize(
    ("format", "end", "change"),
    [
        (Format("gptq", symmetric=True), "qzeros", filled(3)),
        (Format("gptq", symmetric=True), "down_proj.qzeros", lambda each: each + 1),  # 7 and 8
        (Format("gptq_v2", symmetric=True), "qzeros", filled(7)),
        (Format("awq", symmetric=True), "qzeros", filled(9)),
        (Format(COMPRESSED, bits=4), "zero_point", filled(9)),
        (Format(COMPRESSED, bits=8), "zero_point", filled(129, 8)),
        (Format(WHOLE, bits=8), "zero_point", lambda each: torch.ones_like(each)),
    ],
    ids=["gptq", "gptq-mixed", "gptq_v2", "awq", "packed", "packed-8-bits", "whole"],
)
def test_other_zero_points_of_symmetric_weights_are_refused(
    format: Format, end: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    quantized, _ = pair(tmp_path, format, **DENSE)
    replaced(quantized, end, change)
    if format.method == "awq":
        config(zero_point=False)(quantized)
    elif not format.method.startswith("gptq"):
        group("weights", symmetric=True)(quantized)
    middle = 1 << format.bits - 1
    with pytest.raises(CheckpointError, match=rf"_proj has zero points other than {middle}, .* as symmetric"):
        load(quantized)


def test_int8_activations_with_zero_points_of_symmetric_weights_are_refused(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, Format(WHOLE, symmetric=True, activations=True), **DENSE)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.weight_zero_point"] = torch.ones_like(tensors[f"{DOWN}.weight_scale"], dtype=torch.int8)

    change_tensors(quantized, add)
    with pytest.raises(CheckpointError, match=f"{DOWN} has zero points other than 8"):
        load(quantized)


def test_symmetric_activations_with_an_offset_are_refused(tmp_path: Path) -> None:
    made = make_pair(tmp_path, COMPRESSED, "w8a8")
    group("input_activations", symmetric=True)(made.folder)
    with pytest.raises(CheckpointError, match=r"q_proj has the input_zero_point -7, .* as symmetric"):
        load(made.folder)
    replaced(made.folder, "input_zero_point", torch.zeros_like)
    load(made.folder)


CONTRADICTIONS: dict[str, tuple[Format, dict[str, Any], str]] = {
    "bits of AWQ": (Format("awq"), {"bits": 4, "w_bit": 8}, f"{WHERE} has bits 4 and w_bit 8"),
    "groups of AWQ": (Format("awq"), {"q_group_size": 64}, f"{WHERE} has group_size 32 and q_group_size 64"),
    "the format of AWQ": (Format("awq"), {"checkpoint_format": "gptq"}, f"{WHERE} has version 'gemm' and checkpoint_f"),
    "zero points of AWQ": (Format("awq"), {"sym": True}, f"{WHERE} has zero_point True and sym True"),
    "the version of GPTQ": (
        Format("gptq"),
        {"format": "gptq_v2"},
        f"{WHERE} has checkpoint_format 'gptq' and format 'gptq_v2'",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_keys_of_one_meaning_must_agree(case: tuple[Format, dict[str, Any], str], tmp_path: Path) -> None:
    format, changes, message = case
    quantized, _ = pair(tmp_path, format, **DENSE)
    config(**changes)(quantized)
    with pytest.raises(ConfigError, match=message):
        load(quantized)


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        (Format(WHOLE, bits=8, group=0, symmetric=True), {"group_size": 32}),
        (Format("compressed-fp8", group=0), {"group_size": 32}),
        (Format("compressed-fp8", group=0), {"block_structure": [32, 32]}),
    ],
    ids=["groups of rows", "groups of float8", "blocks of rows"],
)
def test_a_strategy_must_fit_its_sizes(format: Format, changes: dict[str, Any], tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, format, **DENSE)
    group("weights", **changes)(quantized)
    with pytest.raises(ConfigError, match=r"group_size( of quantized weights is)? .*32|blocks .*\[32, 32\]"):
        load(quantized)


# Which layers are quantized.

LISTS: dict[str, tuple[Format, dict[str, Any]]] = {
    "awq, dot": (Format("awq"), {"modules_to_not_convert": [FIRST]}),
    "awq, another model's names": (Format("awq"), {"modules_to_not_convert": ["model.language_model.layers.0"]}),
    "awq, null": (Format("awq"), {"modules_to_not_convert": None}),
    "awq, expression": (Format("awq"), {"modules_to_not_convert": [r"re:.*\.0\..*"]}),
    "gptq, excluded": (Format("gptq"), {"dynamic": {r"-:.*\.layers\.0\..*": {}}}),
    "gptq, nothing": (Format("gptq"), {"dynamic": {}}),
    "gptq, no rule": (Format("gptq"), {"dynamic": {r".*": {}, "+:lm_head": {"bits": 8}}}),
    "gptq, another version": (
        Format("gptq_v2"),
        {"checkpoint_format": "gptq", "dynamic": {"+:.*": {"checkpoint_format": "gptq_v2"}}},
    ),
    "gptq, the same": (Format("gptq"), {"dynamic": {r"+:.*": {"bits": 4, "group_size": 32, "mse": 2.4}}}),
    "fp8": (Format("fp8"), {"modules_to_not_convert": ["lm_head"]}),
    "fp8, older name": (Format("fp8"), {"ignored_layers": ["model.layers.0"]}),
    "compressed": (Format(COMPRESSED), {"ignore": None}),
    "compressed, other names": (Format(COMPRESSED), {"ignore": ["re:model.language_model.layers.0.*"]}),
}


@pytest.mark.parametrize("case", LISTS.values(), ids=LISTS.keys())
def test_layers_in_floating_point_need_no_list(case: tuple[Format, dict[str, Any]], tmp_path: Path) -> None:
    format, changes = case
    quantized, plain = pair(tmp_path, format, **DENSE)
    restored(quantized, plain, FIRST)
    config(**changes)(quantized)
    assert len(quantized_paths(quantized)) == 4
    assert error(logits(load(quantized)), logits(load(plain))) < 1e-5


EXCLUDED: dict[str, tuple[Format, dict[str, Any], str]] = {
    "awq": (Format("awq"), {"modules_to_not_convert": ["x", FIRST]}, f"'{FIRST}' in modules_to_not_convert of {WHERE}"),
    "gptq": (Format("gptq"), {"dynamic": {"-:.*down": {}}}, f"'-:.*down' in dynamic of {WHERE}"),
    "fp8": (Format("fp8"), {"ignored_layers": ["down_proj"]}, f"'down_proj' in ignored_layers of {WHERE}"),
    "name": (Format(COMPRESSED), {"ignore": [QUERY]}, f"'{QUERY}' in ignore of {WHERE}"),
    "expression": (Format(COMPRESSED), {"ignore": ["re:.*down"]}, f"'re:.*down' in ignore of {WHERE}"),
    "kind": (Format(COMPRESSED), {"ignore": ["Linear"]}, f"'Linear' in ignore of {WHERE}"),
}


@pytest.mark.parametrize("case", EXCLUDED.values(), ids=EXCLUDED.keys())
def test_an_entry_that_excludes_a_quantized_layer_is_named(
    case: tuple[Format, dict[str, Any], str], tmp_path: Path
) -> None:
    format, changes, entry = case
    quantized, _ = pair(tmp_path, format, **DENSE)
    config(**changes)(quantized)
    with pytest.raises(CheckpointError, match=rf"{entry} excludes model\.layers\.[01]\..*_proj, .* quantized"):
        load(quantized)


def test_a_quantized_layer_that_no_group_names(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, Format(COMPRESSED), **DENSE)
    change_json(
        quantized / "config.json",
        lambda value: value["quantization_config"]["config_groups"]["group_0"].update(targets=["re:.*self_attn.*"]),
    )
    with pytest.raises(
        CheckpointError, match=rf"the lack of a target in config_groups of {WHERE} excludes .*gate_proj"
    ):
        load(quantized)


def test_experts_of_mxfp4_that_a_list_excludes(tmp_path: Path) -> None:
    quantized, _ = gpt_oss_pair(tmp_path)
    config(modules_to_not_convert=["model.layers.1.mlp"])(quantized)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp' in modules_to_not_convert .* excludes .*experts"):
        load(quantized)


def test_a_type_of_modelslim_without_effect_and_one_that_contradicts(tmp_path: Path) -> None:
    made = make_pair(tmp_path, "modelslim", "w8a8_dynamic", keep=(DOWN,))
    change_json(made.folder / DESCRIPTION, lambda value: value.pop(f"{DOWN}.weight"))
    assert DOWN not in quantized_paths(made.folder)
    change_json(made.folder / DESCRIPTION, lambda value: value.update({f"{DOWN}.weight": "W8A8_DYNAMIC"}))
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.weight is F32, expected int8"):
        load(made.folder)
    change_json(made.folder / DESCRIPTION, lambda value: value.update({f"{DOWN}.weight": "FLOAT"}))
    change_json(made.folder / DESCRIPTION, lambda value: value.update({f"{QUERY}.weight": "FLOAT"}))
    with pytest.raises(CheckpointError, match=f"'FLOAT' in {DESCRIPTION} excludes {QUERY}"):
        load(made.folder)


@pytest.mark.parametrize(
    "rules",
    [
        {"+:.*down_proj": {"bits": 8, "group_size": -1}},
        {"-:.*embed.*": {}, ".*down_proj": {"bits": 8, "group_size": -1}, "+:.*down.*": {"bits": 3}},
        {r"+:model\.language_model\..*down_proj": {"bits": 8, "group_size": -1}},
    ],
    ids=["one", "first wins", "other names"],
)
def test_rules_of_gptq_for_single_layers(rules: dict[str, Any], tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path / "4", Format("gptq"), **DENSE)
    others = pair(tmp_path / "8", Format("gptq", bits=8, group=0), **DENSE)
    for each, other in zip((quantized, plain), others, strict=True):
        of_all, wide = (load_file(folder / "model.safetensors") for folder in (each, other))
        down = {name: value for name, value in wide.items() if ".down_proj." in name}
        kept = {name: value for name, value in of_all.items() if ".down_proj." not in name}
        save_file(kept | down, each / "model.safetensors")
    config(dynamic=rules)(quantized)
    assert error(logits(load(quantized)), logits(load(plain))) < 1e-5


@pytest.mark.parametrize(
    ("rules", "kind", "message"),
    [
        ([], None, ""),
        (["-:x"], CheckpointError, "dynamic of .* is .*, not a table of rules"),
        ({"+:.*": 3}, CheckpointError, r"the rule '\+:\.\*' .* is 3, not a table"),
        ({"-:(": {}}, CheckpointError, "the regular expression .* is not valid"),
        ({"+:.*": {"bits": 3}}, ConfigError, r"the rule '\+:\.\*' in dynamic .* has weights of 3 bits"),
        (
            {"+:.*": {"checkpoint_format": "gptq_v3"}},
            ConfigError,
            "the rule .* has the checkpoint_format 'gptq_v3', which hal does not support",
        ),
    ],
)
def test_bad_rules_of_gptq(rules: Any, kind: type[Exception] | None, message: str, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, Format("gptq"), **DENSE)
    config(dynamic=rules)(quantized)
    if kind is None:
        load(quantized)
        return
    with pytest.raises(kind, match=message):
        load(quantized)


OLDER, NEWER = {"": "model.", "visual.": "visual."}, {"": "model.language_model.", "visual.": "model.visual."}
IGNORED: dict[str, list[str] | None] = {
    "older": ["lm_head", "re:visual.*"],
    "newer": ["lm_head", "re:model.visual.*"],
    "oldest": ["re:language_model.lm_head", "re:visual.*"],
    "single": [f"visual.blocks.{block}.{part}" for block in range(4) for part in ("attn.qkv", "attn.proj")],
    "null": None,
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.seeing import build

    build("Qwen2_5_VL", 3, path := tmp_path_factory.mktemp("seeing"))
    return path


@thorough(MODE, r"\[(older-(newer|oldest|single)|newer-(oldest|single|null))")
@pytest.mark.parametrize("ignore", IGNORED.values(), ids=IGNORED.keys())
@pytest.mark.parametrize("names", [OLDER, NEWER], ids=["older", "newer"])
def test_lists_in_other_names_of_towers(
    names: Mapping[str, str], ignore: list[str] | None, seeing: Path, tmp_path: Path
) -> None:
    """Of a group for the MLPs and one for the others, whose targets have the names of the other version."""
    config, wide = json.loads((seeing / "config.json").read_text()), load_file(seeing / "model.safetensors")
    one, other = Format(WHOLE, bits=8, group=0, symmetric=True), Format("compressed-fp8", group=0)
    draw, narrow = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for full, tensor in wide.items():
        core = full.removeprefix("model.").removeprefix("language_model.")
        named = (
            core
            if core.startswith("lm_head")
            else names["visual." * core.startswith("visual.")] + core.removeprefix("visual.")
        )
        layer = named.removesuffix(".weight")
        if core.startswith("layers.") and core.endswith("_proj.weight"):
            found, _ = (one if ".mlp." in core else other).quantized(tensor, draw)
            narrow |= {f"{layer}.{each}": value.contiguous() for each, value in found.items()}
        else:
            narrow[named] = tensor
    save_file(narrow, tmp_path / "model.safetensors")
    prefix = r"re:model\.layers" if names is NEWER else r"re:model\.language_model\.layers"
    groups = {
        name: {**each.section()["config_groups"]["group_0"], "format": each.section()["format"], "targets": [target]}
        for name, each, target in (("a", one, rf"{prefix}.*\.mlp\..*"), ("b", other, rf"{prefix}.*self_attn.*"))
    }
    described = {**one.section(), "format": "mixed-precision", "config_groups": groups, "ignore": ignore}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    model = load(tmp_path)
    kinds = {path: each.form.numbers for path, each in kept_layers(model).items()}
    assert {kind for path, kind in kinds.items() if ".mlp." in path} == {"int8"}
    assert {kind for path, kind in kinds.items() if ".self_attn." in path} == {"float8"}
    assert isinstance(model.get_submodule("visual.blocks.0.attn.qkv"), Linear)
    assert "visual.blocks.0.attn.qkv" not in kinds


# Values without effect, and what a reading leaves out.


@thorough(MODE, r"\[w8a(16|8_dynamic)-")
@pytest.mark.parametrize("value", ["static", "weight", "STATIC", False, "group"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_order_of_rows_has_no_effect(scheme: Scheme, value: object, tmp_path: Path) -> None:
    made = make_pair(tmp_path, COMPRESSED, scheme)
    before = load(made.folder)
    group("weights", actorder=value)(made.folder)
    after = load(made.folder)
    kinds = [[type(each) for each in model.modules()] for model in (before, after)]
    assert kinds[0] == kinds[1]
    assert torch.equal(logits(before), logits(after))


@thorough(MODE, r"(rows|tensors)")
@pytest.mark.parametrize("value", ["static", "weight", False])
@pytest.mark.parametrize("size", [0, -1, 32], ids=["rows", "tensors", "blocks"])
def test_an_order_of_float8_has_no_effect(size: int, value: object, tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, Format("compressed-fp8", group=size), **DENSE)
    group("weights", actorder=value)(quantized)
    assert error(logits(load(quantized)), logits(load(plain))) < 1e-5


@pytest.mark.parametrize("format", [Format(COMPRESSED), Format("compressed-fp8", group=0)], ids=["packed", "float8"])
def test_an_unknown_order_is_refused(format: Format, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, format, **DENSE)
    group("weights", actorder="sideways")(quantized)
    with pytest.raises(ConfigError, match=f"actorder of the weights of group_0 in {WHERE} is 'sideways'"):
        load(quantized)


IGNORES: dict[str, tuple[Any, ...]] = {
    "float8": (Format("compressed-fp8", group=0, activations=True), ""),
    "grouped float8": (
        Format("compressed-fp8", group=0, activations=True),
        "input_activations of group_0 (8 bits, float)",
        {"strategy": "group", "group_size": 128},
    ),
    "float4": (
        Format("nvfp4-pack-quantized", activations=True),
        "input_activations of group_0 (4 bits, float)",
        {"num_bits": 4, "strategy": "tensor_group", "dynamic": "local", "group_size": 16},
    ),
    "fp8": (Format("fp8"), "activation_scheme 'dynamic'"),
    "int8": (Format(WHOLE, bits=8, activations=True), "input_activations of group_0 (8 bits, int)"),
    "int4": (attrs.evolve(Format(COMPRESSED, activations=True)), "input_activations of group_0 (8 bits, int)"),
    "none": (Format(COMPRESSED), ""),
    "as stated": (Format(COMPRESSED, symmetric=True, activations=True), ""),
}


@pytest.mark.parametrize("case", IGNORES.values(), ids=IGNORES.keys())
def test_activations_that_stay_in_floating_point_are_logged(
    case: tuple[Any, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    format, what, *changes = case
    quantized, _ = pair(tmp_path, format, **DENSE)
    for each in changes:
        group("input_activations", **each)(quantized)
    with caplog.at_level(logging.WARNING, "hal"):
        load(quantized)
    found = [each.getMessage() for each in caplog.records if "activation" in each.getMessage()]
    assert len(found) == bool(what)
    assert all(what in each for each in found)
