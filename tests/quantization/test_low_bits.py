"""Tests for weights of 8 and 4 bits: every format against the dequantized weights, whole, split and converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.low_bits import (
    DENSE,
    DOWN,
    FLOAT4,
    SPARSE,
    TOKENS,
    WHOLE,
    Format,
    gpt_oss_pair,
    load,
    logits,
    modelslim,
    packed,
    pair,
    ranks,
    stacked_pair,
    write,
)
from helpers.quantized import (
    all_layers,
    change_json,
    change_tensors,
    check_ranks,
    config,
    error,
    group,
    kept_layers,
    wide,
)
from helpers.thorough import EXHAUSTIVE, LONG, MODE, thorough
from safetensors.torch import load_file
from torch import Tensor

import hal
from hal.errors import CheckpointError, ConfigError, HalError
from hal.ops.forms import Form, pack_int4, unpack_int4

LARGER = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
"""Sizes of whole groups on each of four ranks."""
COMPRESSED = "compressed-tensors"
HALF, SHORT = torch.float16, torch.bfloat16
FORMATS = {
    "packed": Format(COMPRESSED, symmetric=True, dtype=SHORT),
    "packed-zero-points": Format(COMPRESSED, group=64),
    "packed-rows": Format(COMPRESSED, group=0, symmetric=True),
    "packed-8-bits": Format(COMPRESSED, bits=8),
    "whole-w8a8": Format(WHOLE, bits=8, activations=True),
    "whole-8-bits": Format(WHOLE, bits=8, symmetric=True),
    "whole-4-bits": Format(WHOLE, group=64),
    "awq": Format("awq", dtype=HALF),
    "gptq": Format("gptq", dtype=HALF),
    "gptq-rows": Format("gptq", group=0, symmetric=True),
    "gptq-8-bits": Format("gptq", bits=8, symmetric=True),
    "gptq_v2": Format("gptq_v2"),
    "gptq_v2-8-bits": Format("gptq_v2", bits=8),
    "fp8-blocks": Format("fp8"),
    "fp8-e8m0": Format("fp8", dtype=torch.float8_e8m0fnu),
    "fp8-tensors": Format("fp8", group=-1),
    "compressed-fp8-rows": Format("compressed-fp8", group=0),
    "compressed-fp8-blocks": Format("compressed-fp8"),
    "compressed-fp8-tensors": Format("compressed-fp8", group=-1),
    "nvfp4": Format("nvfp4-pack-quantized"),
    "packed-mxfp4": Format("mxfp4-pack-quantized"),
}
ORDERED = {
    "gptq": Format("gptq", ordered=True),
    "gptq-8-bits": Format("gptq", bits=8, symmetric=True, ordered=True),
    "gptq_v2": Format("gptq_v2", ordered=True),
    "packed": Format(COMPRESSED, symmetric=True, ordered=True),
    "whole": Format(WHOLE, symmetric=True, ordered=True),
    "whole-8-bits": Format(WHOLE, bits=8, ordered=True),
}
W4A8 = {
    "packed": Format(COMPRESSED, symmetric=True, activations=True),
    "whole": Format(WHOLE, group=64, symmetric=True, activations=True),
    "whole-rows": Format(WHOLE, group=0, symmetric=True, activations=True),
}
W8A8 = {
    "fp8-rows": Format("compressed-fp8", group=0, activations=True),
    "fp8-blocks": Format("compressed-fp8", activations=True),
    "fp8-tensors": Format("compressed-fp8", group=-1, activations=True),
    "nvfp4": Format("nvfp4-pack-quantized", activations=True),
}
"""Formats of floating-point numbers with activations in float8."""
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())


def test_packing() -> None:
    numbers = torch.randint(-8, 8, (3, 5, 48), generator=torch.Generator().manual_seed(0))
    packed = pack_int4(numbers)
    assert packed.shape == (3, 5, 6)
    assert packed.dtype == torch.int32
    assert torch.equal(unpack_int4(packed), numbers.int())
    assert [hex(each & 0xFFFFFFFF) for each in pack_int4(torch.arange(-4, 4)).tolist()] == ["0x3210fedc"]


@thorough(EXHAUSTIVE, r"\[(packed-[z8r].*|gptq-[r8].*|gptq_v2.*|fp8-[et].*|compressed-fp8-[bt].*)-sparse")
@thorough(MODE, r"\[(packed-[z8].*|gptq-[r8].*|gptq_v2.*|fp8-[et].*|compressed-fp8-[bt].*)-dense")
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@each_format
def test_logits_are_those_of_the_dequantized_weights(format: Format, overrides: dict[str, Any], tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, format, **overrides)
    found = kept_layers(load(quantized))
    numbers = "float4" if format.method in FLOAT4 else "float8" if format.is_float else f"int{format.bits}"
    assert {(each.form.numbers, each.form.inputs) for each in found.values()} == {(numbers, "float")}
    assert any(each.num_experts for each in found.values()) == (overrides is SPARSE)
    assert len(found) == 8
    assert error(logits(quantized), logits(plain)) < 1e-5


@thorough(MODE, r"\[(gptq-8-bits|gptq_v2|whole\])")
@pytest.mark.parametrize("format", ORDERED.values(), ids=ORDERED.keys())
def test_inputs_in_the_order_of_activations(format: Format, cpu: hal.Backend, tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, format, **{**DENSE, **larger(DENSE)})
    found, exact = kept_layers(load(quantized)), logits(plain)
    assert all(each.input_order is not None for each in found.values())
    assert error(logits(quantized), exact) < 1e-5
    assert error(logits(quantized, quantized_weights="dequantized"), exact) < 1e-6
    for count in (2, 4):
        parts = [kept_layers(each) for each in ranks(quantized, count=count)]
        cpu.activate()
        check_ranks(found, parts, gathered=True)


def test_parts_whose_inputs_have_other_orders_are_refused(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, ORDERED["gptq"], **DENSE)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    change_tensors(quantized, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    with pytest.raises(CheckpointError, match=f"{name} orders the inputs by activations otherwise than .*q_proj"):
        load(quantized)


@thorough(EXHAUSTIVE, r"\[(gptq-8-bits|gptq_v2)")
@thorough(MODE, r"\[whole")
@pytest.mark.parametrize("name", ORDERED)
def test_experts_with_inputs_in_the_order_of_activations(name: str, tmp_path: Path) -> None:
    """Each expert may have another order."""
    quantized, plain = pair(tmp_path, ORDERED[name], **SPARSE)
    parts = "gate_proj", "up_proj"

    def shuffle(tensors: dict[str, Tensor]) -> None:
        """Give an expert another order."""
        for full in [each for each in tensors if "layers.1.mlp.experts.2." in each and each.split(".")[-2] in parts]:
            if full.endswith("g_idx"):
                tensors[full] = tensors[full].flip(0)
            elif full.endswith(".weight"):
                tensors[full] = tensors[full].flip(1).contiguous()
            elif full.endswith(("qweight", "weight_packed")):
                columns = tensors[full] if full.endswith("qweight") else tensors[full].t()
                bits = ORDERED[name].bits
                numbers = torch.stack([columns >> bits * place & (1 << bits) - 1 for place in range(32 // bits)], 1)
                flipped = packed(numbers.flatten(0, 1).flip(0).t(), bits)
                tensors[full] = (flipped.t() if full.endswith("qweight") else flipped).contiguous()

    def shuffle_plain(tensors: dict[str, Tensor]) -> None:
        for part in parts:
            full = f"model.layers.1.mlp.experts.2.{part}.weight"
            tensors[full] = tensors[full].flip(1).contiguous()

    change_tensors(quantized, shuffle)
    change_tensors(plain, shuffle_plain)
    assert error(logits(quantized), logits(plain)) < 1e-5
    exact = load(plain)
    for path, layer in all_layers(load(quantized, quantized_weights="dequantized")).items():
        assert error(layer.weight, exact.get_submodule(path).weight) < 1e-6, path
    for target in ("w8a16", "w8a8_dynamic"):
        assert len(kept_layers(load(quantized, quantized_weights=target))) == 8


@thorough(EXHAUSTIVE, r"\[(gptq-8-bits|gptq_v2)|-4-")
@thorough(MODE, r"\[(packed|whole-2|whole-8-bits-2-sparse)")
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ORDERED)
def test_ranks_divide_converted_inputs_in_any_order(
    name: str, count: int, overrides: dict[str, Any], tmp_path: Path
) -> None:
    quantized, _ = pair(tmp_path, ORDERED[name], **{**overrides, **larger(overrides)})
    whole = all_layers(load(quantized, quantized_weights="dequantized"))
    parts = [all_layers(each) for each in ranks(quantized, count=count, quantized_weights="dequantized")]
    for path, layer in whole.items():
        mine = [each[path].weight for each in parts]
        if layer.shard == "in_features":
            assert torch.equal(torch.cat(mine, -1), layer.weight), path
        else:
            sizes = list(parts[0][path].sizes)
            by_part = zip(*(each.split(sizes, -2) for each in mine), strict=True)
            assert torch.equal(torch.cat([rank for part in by_part for rank in part], -2), layer.weight), path


ROUNDED = W4A8 | W8A8


@thorough(MODE, r"\[(packed-dense|whole-sparse|whole-rows-dense|fp8-rows-dense|fp8-tensors|nvfp4-sparse)")
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("format", ROUNDED.values(), ids=ROUNDED.keys())
def test_activations_of_8_bits(format: Format, overrides: dict[str, Any], cpu: hal.Backend, tmp_path: Path) -> None:
    """Test each layer against its dequantized weight, and its dequantized activations, whole and split."""
    quantized, plain = pair(tmp_path, format, **overrides)
    whole, exact = kept_layers(load(quantized)), load(plain)
    parts = [kept_layers(each) for each in ranks(quantized)]
    integers = format in W4A8.values()
    assert {each.form.inputs for each in whole.values()} == {"int8" if integers else "float8"}
    assert len(whole) == 8
    cpu.activate()
    for path, layer in whole.items():
        x = torch.randn(6, layer.in_features, generator=torch.Generator().manual_seed(1))
        counts = [] if layer.num_experts is None else [torch.tensor([2, 0, 1, 3])]
        scale = x.abs().amax(-1) / (127 if integers else 448)
        scaled = x / scale.unsqueeze(-1)
        numbers = scaled.round() if integers else scaled.to(torch.float8_e4m3fn).float()
        found = layer(x, *counts)
        assert error(found, exact.get_submodule(path)(numbers * scale.unsqueeze(-1), *counts)) < 1e-5, path
        if layer.shard != "in_features":  # Ranks that share inputs have other scales of activations.
            check_ranks({path: layer}, parts)
    assert error(logits(quantized, quantized_weights="dequantized"), logits(plain)) < 1e-6


@thorough(MODE, r"\[(0-sparse|32-dense)")
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("group", [0, 32])
def test_int4_of_modelslim(group: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    format = Format(WHOLE, group=group, symmetric=True, activations=True)
    quantized, plain = pair(tmp_path, format, **overrides)
    exact = logits(plain)
    modelslim(quantized, group)
    found = {each.form for each in kept_layers(load(quantized)).values()}
    assert (Form("int8", inputs="int8") in found) == (group == 0)
    assert Form("int4", columns=group, inputs="int8") in found
    assert error(logits(quantized, quantized_weights="dequantized"), exact) < 1e-6
    assert len(kept_layers(ranks(quantized)[1])) == 8


def test_unpacked_int4_of_modelslim_is_refused(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, W4A8["whole-rows"], **DENSE)
    modelslim(quantized, 0, version="0")
    with pytest.raises(CheckpointError, match="has the version '0', in which hal does not read W4A8_DYNAMIC"):
        load(quantized)


def of_modelslim(folder: Path) -> Path:
    quantized, _ = pair(folder, attrs.evolve(W4A8["whole"], group=32), **SPARSE)
    modelslim(quantized, 32)
    return quantized


SCALES = ("scale", "scales", "scale_inv")
COMPILED: dict[str, Callable[[Path], Path]] = {
    **{name: lambda folder, each=each: pair(folder, each, **SPARSE)[0] for name, each in FORMATS.items()},
    **{f"{name}-a8": lambda folder, each=each: pair(folder, each, **SPARSE)[0] for name, each in ROUNDED.items()},
    **{f"{name}-ordered": lambda folder, each=each: pair(folder, each, **DENSE)[0] for name, each in ORDERED.items()},
    "fp8-experts": lambda folder: stacked_pair(folder)[0],
    "mxfp4": lambda folder: gpt_oss_pair(folder)[0],
    "modelslim": of_modelslim,
}


@thorough(EXHAUSTIVE, r"\[(?!fp8-blocks-graph|awq-piecewise\]|gptq-ordered-graph)")
@thorough(LONG, r"\[awq-piecewise\]")
@thorough(MODE, r"\[gptq-ordered-graph")
@pytest.mark.parametrize("compiler", ["graph", "piecewise", "piecewise_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps(name: str, compiler: str, tmp_path: Path) -> None:
    """Of experts, which have dense layers beside them; inputs that are ordered, of dense layers."""
    quantized = COMPILED[name](tmp_path)
    assert error(logits(quantized, compiler), logits(quantized)) < 1e-5


@thorough(MODE, r"\[(?!gptq-ordered)")
@pytest.mark.parametrize("name", COMPILED)
def test_weights_are_replaced(name: str, tmp_path: Path) -> None:
    quantized = COMPILED[name](tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    scales = {each: tensors[each] for each in tensors if each.endswith(SCALES) and "global" not in each}
    changed = {  # those of MXFP4 are exponents
        name: (each.float() / 2).to(each.dtype) if each.is_floating_point() else each + 1
        for name, each in scales.items()
    }
    with hal.open({"backend": "cpu", "options": {"pack_weights": False}}) as backend:
        runner = hal.Runner(hal.load_model(quantized, backend), backend)
        batch = runner.batch([TOKENS], [[1]])
        before = runner.step(batch).logits.clone()
        hal.replace_weights(runner, tensors | changed)
        assert error(runner.step(batch).logits, before) > 1e-3
        hal.replace_weights(runner, tensors)
        assert torch.equal(runner.step(batch).logits, before)


def test_experts_of_float8_in_one_tensor(cpu: hal.Backend, tmp_path: Path) -> None:
    quantized, plain = stacked_pair(tmp_path)
    found = kept_layers(load(quantized))
    stacked = {path: each for path, each in found.items() if each.num_experts is not None}
    assert len(stacked) == 4
    assert error(logits(quantized), logits(plain)) < 1e-5
    for count in (2, 4):  # Four ranks cut inside blocks of rows.
        parts = [kept_layers(each) for each in ranks(quantized, count=count)]
        cpu.activate()
        check_ranks(stacked, parts)


def test_blocks_of_rows_of_both_parts_are_refused(tmp_path: Path) -> None:
    quantized, _ = stacked_pair(tmp_path, moe_intermediate_size=80)
    with pytest.raises(ConfigError, match=r"gate_up_proj of all .* of 32 rows, of which one covers rows of both"):
        load(quantized)


def test_numbers_beyond_their_bits_are_refused(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, FORMATS["whole-4-bits"], **DENSE)
    change_tensors(quantized, lambda tensors: tensors[f"{DOWN}.weight"][3].fill_(9))
    with pytest.raises(CheckpointError, match=rf"{DOWN}\.weight has numbers of more than 4 bits"):
        load(quantized)


def test_weights_stay_packed(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, FORMATS["awq"], **DENSE)
    down = kept_layers(load(quantized))[DOWN]
    assert (down.weight.dtype, down.weight.shape) == (torch.int32, (64, 16))
    assert (down.weight_scale.dtype, down.weight_scale.shape) == (torch.float16, (64, 4))
    assert down.weight_zero_point.dtype == torch.int8


def test_experts_of_gpt_oss(cpu: hal.Backend, tmp_path: Path) -> None:
    quantized, plain = gpt_oss_pair(tmp_path)
    model = load(quantized)
    found = kept_layers(model)
    assert {each.form for each in found.values()} == {Form("float4", columns=32, scales="e8m0")}
    assert len(found) == 4
    path, layer = next(iter(found.items()))
    exact = load(plain).get_submodule(path).weight
    assert torch.equal(wide(layer), exact)
    held = sum(each.nbytes for layer in found.values() for each in (layer.weight, layer.weight_scale))
    assert held / sum(load(plain).get_submodule(path).weight.numel() for path in found) == 4.25 / 8
    assert error(logits(quantized), logits(plain)) < 1e-5
    assert error(logits(quantized, "graph"), logits(quantized)) < 1e-5
    assert torch.equal(all_layers(load(quantized, quantized_weights="dequantized"))[path].weight, exact)
    parts = [kept_layers(each) for each in ranks(quantized)]
    cpu.activate()
    check_ranks(found, parts)


def test_layers_that_a_checkpoint_leaves_out(tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, FORMATS["awq"], **DENSE)
    floats, narrow = (load_file(each / "model.safetensors") for each in (plain, quantized))
    kept = {name: each for name, each in narrow.items() if not name.startswith(DOWN)}
    section = {**FORMATS["awq"].section(), "modules_to_not_convert": ["layers.1.mlp.down_proj"]}
    write(quantized, {**kept, f"{DOWN}.weight": floats[f"{DOWN}.weight"]}, section)
    assert DOWN not in kept_layers(load(quantized))
    assert error(logits(quantized), logits(plain)) < 1e-5


@thorough(EXHAUSTIVE, r"\[(packed-zero-points|awq|compressed-fp8-tensors)-sparse|gptq-dense")
@thorough(MODE, r"\[(packed-zero-points|awq|fp8-blocks|compressed-fp8-tensors)-dense")
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ["packed-zero-points", "awq", "gptq", "fp8-blocks", "compressed-fp8-tensors"])
def test_converted_weights(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, FORMATS[name], **overrides)
    exact = logits(plain)
    found = all_layers(load(quantized, quantized_weights="dequantized"))
    assert not any(each.quantized for each in found.values())
    assert error(logits(quantized, quantized_weights="dequantized"), exact) < 1e-6
    reference = load(plain)
    for target, form in (("w8a16", Form("int8")), ("w8a8_dynamic", Form("int8", inputs="int8"))):
        for path, layer in kept_layers(load(quantized, quantized_weights=target)).items():
            assert layer.form == form
            assert layer.weight.dtype == torch.int8
            assert error(wide(layer), reference.get_submodule(path).weight) < 0.015


def test_weights_dequantized_to_half_precision(tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, FORMATS["fp8-blocks"], **DENSE)
    model = load(quantized, quantized_weights="dequantized", dtype="bfloat16")
    exact = load_file(plain / "model.safetensors")[f"{DOWN}.weight"]
    assert torch.equal(all_layers(model)[DOWN].weight, exact.bfloat16())


def test_only_quantized_weights_are_converted(tmp_path: Path) -> None:
    _, plain = pair(tmp_path, FORMATS["awq"], **DENSE)
    with pytest.raises(ConfigError, match=r"quantized_weights is 'w8a16', and .* has no quantized weights"):
        load(plain, quantized_weights="w8a16")


def larger(overrides: dict[str, Any]) -> dict[str, int]:
    """Return sizes that give each of four ranks whole groups."""
    return {key: size for key, size in LARGER.items() if key in overrides} | {"num_key_value_heads": 4}


@thorough(
    EXHAUSTIVE,
    r"\[(.*(gptq-8|gptq_v2|gptq-rows|whole-8|.*a8|packed-8|fp8-e8m0|compressed-fp8-blocks|packed-rows)|.*-dequantized"
    r"|[^\]]*(packed-zero|gptq|whole|fp8-tensors)[^\]]*-4\])",
)
@thorough(MODE, r"\[((?!awq).*-4\]|(gptq|whole-4-bits|packed-zero-points)-dense)")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("converted", ["kept", "dequantized"])
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@each_format
def test_ranks_cut_groups_as_they_cut_columns(
    format: Format, overrides: dict[str, Any], converted: str, count: int, cpu: hal.Backend, tmp_path: Path
) -> None:
    quantized, _ = pair(tmp_path, format, **{**overrides, **(larger(overrides) if count > 2 else {})})
    given = {"quantized_weights": converted}
    whole = all_layers(load(quantized, **given))
    parts = [all_layers(each) for each in ranks(quantized, count=count, **given)]
    assert len(whole) == 8
    cpu.activate()
    check_ranks(whole, parts)


CUT = {
    "nvfp4": lambda folder: pair(folder, FORMATS["nvfp4"], **{**DENSE, **larger(DENSE), "intermediate_size": 96})[0],
    "mxfp4": lambda folder: gpt_oss_pair(folder, intermediate_size=192, num_key_value_heads=4)[0],
    "awq": lambda folder: pair(folder, Format("awq"), **{**DENSE, **larger(DENSE), "intermediate_size": 320})[0],
    "gptq-8-bits": lambda folder: pair(
        folder, Format("gptq", bits=8), **{**DENSE, **larger(DENSE), "intermediate_size": 160}
    )[0],
    "packed": lambda folder: pair(
        folder, Format(COMPRESSED, group=64), **{**DENSE, **larger(DENSE), "intermediate_size": 384}
    )[0],
}
"""Models whose inputs four ranks cut inside groups, by format."""


@pytest.mark.parametrize("converted", ["kept", "dequantized"])
@pytest.mark.parametrize("name", CUT)
def test_ranks_cut_inside_groups(name: str, converted: str, cpu: hal.Backend, tmp_path: Path) -> None:
    """Smaller groups then share the scale of a group."""
    quantized = CUT[name](tmp_path)
    given = {"quantized_weights": converted}
    whole = all_layers(load(quantized, **given))
    parts = [all_layers(each) for each in ranks(quantized, count=4, **given)]
    cpu.activate()
    check_ranks(whole, parts)
    inside = [path for path, layer in whole.items() if parts[0][path].form.columns < layer.form.columns]
    assert bool(inside) == (converted == "kept")


HELD = FORMATS | {f"{name}-ordered": each for name, each in ORDERED.items()}


@thorough(
    EXHAUSTIVE, r"\[(gptq-8|gptq_v2|gptq-rows|packed-8|fp8-e8m0|compressed-fp8-blocks|packed-rows|whole-8-bits-o)"
)
@pytest.mark.parametrize("format", HELD.values(), ids=HELD.keys())
def test_ranks_that_hold_whole_experts(format: Format, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, format, **SPARSE)

    def change(tensors: dict[str, Tensor]) -> None:
        """Give an expert other orders."""
        tensors.update({name: each.flip(0) for name, each in tensors.items() if re.search(r"\.2\.\w+\..*g_idx", name)})

    if format.ordered:
        change_tensors(quantized, change)
    whole, parts = kept_layers(load(quantized)), [kept_layers(each) for each in ranks(quantized, "all_gather")]
    stacked = [path for path, layer in whole.items() if layer.num_experts is not None]
    assert len(stacked) == 4
    for path in stacked:
        for name in ("weight", "weight_scale", *(["input_order"] if format.ordered else [])):
            mine = torch.cat([getattr(each[path], name) for each in parts])
            assert torch.equal(mine.float(), getattr(whole[path], name).float())


def tensor(name: str, change: Callable[[Tensor], Tensor] | None) -> Callable[[Path], object]:
    def changed(tensors: dict[str, Tensor]) -> None:
        found = tensors.pop(name)
        tensors.update({} if change is None else {name: change(found)})

    return lambda folder: change_tensors(folder, changed)


Damage = tuple[str, Callable[[Path], object], type[HalError], str]
CASES: dict[str, Damage] = {
    "act-order": (
        "gptq",
        tensor(f"{DOWN}.g_idx", lambda each: each.flip(0)),
        CheckpointError,
        rf"{DOWN}.g_idx orders the inputs of a layer whose .* by activations \(act-order\)",
    ),
    "zero points of symmetric weights": (
        "packed-zero-points",
        group("weights", symmetric="yes"),
        ConfigError,
        "symmetric of quantized weights is 'yes'",
    ),
    "floating-point weights": (
        "awq",
        config(modules_to_not_convert=[DOWN]),
        CheckpointError,
        f"'{DOWN}' in modules_to_not_convert of .* excludes {DOWN}, which has quantized qweight, qzeros, scales",
    ),
    "another version of AWQ": (
        "awq",
        config(version="gemv"),
        ConfigError,
        "version 'gemv', which hal does not support",
    ),
    "3 bits": ("gptq", config(bits=3), ConfigError, "weights of 3 bits, which hal does not support"),
    "another version of GPTQ": (
        "gptq",
        config(checkpoint_format="marlin"),
        ConfigError,
        "checkpoint_format 'marlin', which hal does not",
    ),
    "rotations": ("gptq", config(rotation="hadamard"), ConfigError, "the rotation 'hadamard', which hal does not"),
    "no group size": ("packed", group("weights", group_size=None), ConfigError, "'group' with the group_size None"),
    "another strategy": ("packed", group("weights", strategy="tensor"), ConfigError, "strategy of quantized weights"),
    "e5m2": ("fp8-blocks", config(fmt="e5m2"), ConfigError, "fmt 'e5m2', which hal does not support"),
    "blocks of nothing": ("fp8-blocks", config(weight_block_size=[0, 32]), ConfigError, r"blocks .* are \[0, 32\]"),
    "nvfp4": (
        "packed",
        config(format="nvfp4-pack-quantized"),
        ConfigError,
        "the format of group_0 in .* is 'nvfp4-pack-quantized', not",
    ),
    "bitsandbytes": ("packed", config(quant_method="bitsandbytes"), ConfigError, "'bitsandbytes'.*(\n.*)*w4a16"),
    "excluded by a number": ("awq", config(modules_to_not_convert=3), CheckpointError, "is 3, not a list of names"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_checkpoints(case: Damage, tmp_path: Path) -> None:
    name, damage, kind, message = case
    quantized, _ = pair(tmp_path, FORMATS[name], **DENSE)
    damage(quantized)
    with pytest.raises(kind, match=message):
        load(quantized)


def claims(name: str, **changes: Any) -> Callable[[Path], object]:
    """Describe the quantization of another format."""
    return lambda folder: change_json(
        folder / "config.json", lambda value: value.update(quantization_config={**FORMATS[name].section(), **changes})
    )


Claim = tuple[str, Callable[[Path], object], str]
CLAIMS: dict[str, Claim] = {
    "awq, but gptq": ("gptq", claims("awq"), r"qweight is \[\d+, \d+\], not"),
    "gptq, but packed": ("packed", claims("gptq"), "qweight is missing"),
    "fp8, but awq": ("awq", claims("fp8-blocks"), "weight is missing"),
    "8 bits, but 4": ("gptq", claims("gptq", bits=8), r"q(weight|zeros) is \[\d+, \d+\], not"),
    "groups of 64, but 32": ("awq", claims("awq", group_size=64), r"(scales|qzeros) is \[\d+, \d+\], not"),
    "blocks of 64, but 32": (
        "fp8-blocks",
        claims("fp8-blocks", weight_block_size=[64, 64]),
        r"weight_scale_inv is \[\d+, \d+\], not",
    ),
    "a scale of rows, but of blocks": (
        "compressed-fp8-blocks",
        claims("compressed-fp8-rows"),
        r"weight_scale is \[\d+, \d+\], not",
    ),
}


@pytest.mark.parametrize("case", CLAIMS.values(), ids=CLAIMS.keys())
def test_files_that_contradict_their_description(
    case: tuple[str, Callable[[Path], object], str], tmp_path: Path
) -> None:
    name, damage, message = case
    quantized, _ = pair(tmp_path, FORMATS[name], **DENSE)
    damage(quantized)
    with pytest.raises(CheckpointError, match=message):
        load(quantized)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_blocks_that_parts_do_not_fill(overrides: dict[str, Any], count: int, cpu: hal.Backend, tmp_path: Path) -> None:
    """Then each row has the scales of its block."""
    sizes = {key: 80 for key in ("intermediate_size", "moe_intermediate_size") if key in overrides}
    quantized, plain = pair(tmp_path, Format("fp8", group=32), **{**overrides, **sizes, "num_key_value_heads": 1})
    whole, exact = kept_layers(load(quantized)), load(plain)
    for path, layer in whole.items():
        assert error(wide(layer), exact.get_submodule(path).weight) < 1e-6, path
    assert error(logits(quantized), logits(plain)) < 1e-5
    if count > 1:
        parts = [kept_layers(each) for each in ranks(quantized, count=count)]
        for path, layer in whole.items():
            if layer.shard != "in_features" and "qkv" not in path:
                mine = zip(*(wide(each[path]).split(list(each[path].sizes), -2) for each in parts), strict=True)
                assert torch.equal(torch.cat([each for part in mine for each in part], -2), wide(layer)), path
