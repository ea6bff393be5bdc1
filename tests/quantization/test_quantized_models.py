"""Tests for models with int8 layers: both formats against independent references, and errors."""

from __future__ import annotations

import functools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from hal.models.qwen3 import Qwen3ForCausalLM
from helpers import held_out, large_checkpoint
from helpers.checkpoints import EXPERTS, random_checkpoint, write_json
from helpers.quantized import (
    DESCRIPTION,
    DOWN,
    DYNAMIC,
    FORMATS,
    QUERY,
    SCHEMES,
    STATIC,
    WEIGHTS,
    Format,
    Scheme,
    all_tensors,
    change_json,
    change_tensors,
    config,
    entries,
    error,
    fake_quantize,
    group,
    kept_layers,
    load,
    logits,
    make_pair,
    names_of,
    quantized,
    section,
    wide,
)
from helpers.thorough import AGAIN, EXHAUSTIVE, MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.cli import main
from hal.device.group import Group
from hal.errors import CheckpointError, ConfigError, HalError
from hal.nn import Linear, MergedLinear, Projection
from hal.parallel import Mesh
from hal.quantization.forms import INT8_DYNAMIC, INT8_STATIC, NAMES
from hal.quantize.quantize_checkpoint import quantize_checkpoint


@thorough(MODE, r"\[.*-True-(True|False)\]")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_model_computes_as_its_dequantized_weights_do(
    format: Format, scheme: Scheme, bias: bool, tied: bool, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, format, scheme, attention_bias=bias, tie_word_embeddings=tied)
    found = logits(load(pair.folder))
    reference = load(pair.float_folder)
    for path, module in reference.named_modules():
        if isinstance(module, Linear) and path != "lm_head":
            layer = pair.layers[names_of(path, module)[0]]
            module.register_forward_pre_hook(partial(fake_quantize, layer, scheme))
    wanted = logits(reference)
    effect = error(logits(load(pair.float_folder)), wanted)
    assert effect == 0 if scheme == "w8a16" else effect > 0.005
    # The bias of a static layer is a multiple of its scale.
    assert error(found, wanted) < (effect / 4 if bias and scheme == "w8a8" else 1e-5)


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_exact(format: Format, scheme: Scheme, bits: bool, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, format, scheme, bits=bits, attention_bias=True)
    model = load(pair.folder)
    found = kept_layers(model)
    assert len(found) == 8, "four projections in each of the two layers"
    generator = torch.Generator().manual_seed(0)
    for path, module in found.items():
        assert module.form == NAMES[scheme][0]
        assert module.weight.dtype == torch.int8
        layers = [pair.layers[name] for name in names_of(path, module)]
        x = torch.randn(5, module.weight.shape[1], generator=generator)
        y = module(x)
        assert y.dtype == x.dtype
        wanted = torch.cat(
            [
                fake_quantize(layer, scheme, module, (x.double(),))[0] @ layer.dequantized().t()
                + (0 if layer.bias is None else layer.bias.double())
                for layer in layers
            ],
            dim=-1,
        )
        # The bias of a static layer is a multiple of its scale.
        unit = max((layer.input_scale * layer.scale).max().item() for layer in layers) if scheme == "w8a8" else 0.0
        assert (y - wanted).abs().max() < unit / 2 + 1e-5
    assert isinstance(getattr(model, "lm_head", None), Linear | None)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("format", FORMATS)
def test_parts_of_different_input_scales(format: Format, tmp_path: Path) -> None:
    """The merged layer has the largest input scale, and each part keeps its weights' scales and bias."""
    pair = make_pair(tmp_path, format, "w8a8", attention_bias=True)
    scales = dict(zip(("q_proj", "k_proj", "v_proj"), (0.02, 0.05, 0.035), strict=True))
    tensors = load_file(pair.folder / "model.safetensors")
    for part, scale in scales.items():
        name = f"model.layers.0.self_attn.{part}"
        pair.layers[name] = attrs.evolve(pair.layers[name], input_scale=scale)
        tensors |= entries(pair.layers[name], name, format, "w8a8", bits=False)
    save_file(tensors, pair.folder / "model.safetensors")
    module = load(pair.folder).get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(module, Linear)
    assert module.form == INT8_STATIC
    assert module.input_scale.unique().tolist() == [pytest.approx(0.05)]
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    layers = [attrs.evolve(pair.layers[f"model.layers.0.self_attn.{part}"], input_scale=0.05) for part in scales]
    wanted = [fake_quantize(layer, "w8a8", module, (x.double(),))[0] @ layer.dequantized().t() for layer in layers]
    biases = torch.cat([layer.bias.double() for layer in layers if layer.bias is not None])
    unit = 0.05 * max(layer.scale.max().item() for layer in layers)
    assert (module(x) - torch.cat(wanted, dim=-1) - biases).abs().max() < unit + 1e-5


@pytest.mark.parametrize("overrides", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("format", FORMATS)
def test_static_layers_are_converted(format: Format, overrides: dict[str, Any], tmp_path: Path) -> None:
    """The input's scale and offset then have no part in the weights and the biases, whole and on ranks."""
    pair = make_pair(tmp_path, format, "w8a8", attention_bias=True, **overrides)
    plain = load(pair.float_folder)
    exact = {path: each for path, each in plain.named_modules() if isinstance(each, Projection)}
    for weights in ("dequantized", "w8a16", "w8a8_dynamic"):
        found = load(pair.folder, quantized_weights=weights)
        for path, layer in exact.items():
            mine = found.get_submodule(path)
            assert error(wide(mine) if mine.quantized else mine.weight, layer.weight) < 1e-6
            if layer.bias is not None:
                unit = max(0.03 * each.scale.max().item() for each in pair.layers.values())
                assert mine.bias.dtype == torch.float32
                assert (mine.bias - layer.bias).abs().max() <= unit / 2 + 1e-6
    ranks = [Group("ranks", rank, 2, object()) for rank in range(2)]
    parts = [load(pair.folder, Mesh(tensor=each), quantized_weights="dequantized") for each in ranks]
    path = "model.layers.0.self_attn.o_proj"
    found, layer = [each.get_submodule(path) for each in parts], plain.get_submodule(path)
    assert error(torch.cat([each.weight for each in found], -1), layer.weight) < 1e-6
    assert (sum(each.bias for each in found) - layer.bias).abs().max() < 0.03


@pytest.mark.parametrize("format", FORMATS)
def test_layers_that_stay(format: Format, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, format, "w8a8_dynamic", keep=(DOWN,), tie_word_embeddings=False)
    if format == "compressed-tensors":
        ignore = section("w8a8_dynamic", ignore=["lm_head", "re:.*layers.1.mlp.down"])
        change_json(pair.folder / "config.json", lambda config: config.update(quantization_config=ignore))
    model = load(pair.folder)
    stays = {path for path, module in model.named_modules() if isinstance(module, Linear) and not module.quantized}
    assert stays == {DOWN, "lm_head"}
    assert logits(model).isfinite().all()


def test_schemes_by_layer(tmp_path: Path) -> None:
    """Groups that name layers take precedence over those for all linear layers."""
    pair = make_pair(tmp_path, "compressed-tensors", "w8a8")
    tensors = load_file(pair.folder / "model.safetensors")
    dropped = [name for name in tensors if ".mlp." in name and ".input_" in name]
    save_file({name: each for name, each in tensors.items() if name not in dropped}, pair.folder / "model.safetensors")
    groups = {
        "all": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": STATIC},
        "mlp": {"targets": ["re:.*[.]mlp[.]"], "weights": WEIGHTS, "input_activations": DYNAMIC},
    }
    both = section("w8a8", config_groups=groups)
    change_json(pair.folder / "config.json", lambda config: config.update(quantization_config=both))
    model = load(pair.folder)
    for path, module in kept_layers(model).items():
        assert module.form == (INT8_DYNAMIC if ".mlp." in path else INT8_STATIC)
    assert logits(model).isfinite().all()


def test_an_output_projection_in_int8(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "modelslim", "w8a8_dynamic", tie_word_embeddings=False)
    plain = load(pair.folder)
    tensors = load_file(pair.folder / "model.safetensors")
    layer = quantized(tensors, "lm_head", 0, 0)
    tensors |= entries(layer, "lm_head", "modelslim", "w8a8_dynamic", bits=False)
    save_file(tensors, pair.folder / "model.safetensors")
    change_json(pair.folder / DESCRIPTION, lambda types: types.update({"lm_head.weight": "W8A8_DYNAMIC"}))
    model = load(pair.folder)
    assert kept_layers(model)["lm_head"].form == INT8_DYNAMIC
    assert 0 < error(logits(model), logits(plain)) < 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
def test_auto_dtype_is_that_of_the_activations(dtype: str | None, tmp_path: Path) -> None:
    folder = quantize_checkpoint(random_checkpoint(tmp_path / "plain"), tmp_path / "out", "w8a8_dynamic").path
    change_json(folder / "config.json", lambda config: config.update(dtype=dtype))
    assert Checkpoint.open(folder).dtype == getattr(torch, dtype or "float32")
    model = load(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype or "float32")}
    assert logits(model).dtype == getattr(torch, dtype or "float32")


def test_names_of_modelslims_own_files(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "modelslim", "w8a8")
    wanted = logits(load(pair.folder))
    tensors = load_file(pair.folder / "model.safetensors")
    (pair.folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(2):
        file = f"quant_model_weights-{shard + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::2]}
        save_file(part, pair.folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(pair.folder / "quant_model_weights.safetensors.index.json", {"weight_map": weight_map})
    (pair.folder / DESCRIPTION).rename(pair.folder / "quant_model_description_w8a8.json")
    change_json(pair.folder / "config.json", lambda config: config.update(quantize="w8a8"))
    assert torch.equal(logits(load(pair.folder)), wanted)


@attrs.frozen
class Case:
    """A broken checkpoint: the change, and the error."""

    format: Format
    scheme: Scheme
    damage: Callable[[Path], object]
    error: type[HalError]
    message: str


def types(changes: dict[str, Any], drop: str = "") -> Callable[[Path], object]:
    def change(value: dict[str, Any]) -> None:
        value.update(changes)
        value.pop(drop, None)

    return lambda folder: change_json(folder / DESCRIPTION, change)


def tensor(name: str, values: Tensor | None) -> Callable[[Path], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        tensors.update({} if values is None else {name: values})

    return lambda folder: change_tensors(folder, change)


def widened(layer: str) -> Callable[[Path], object]:
    """Store a layer in floating point."""

    def change(tensors: dict[str, Tensor]) -> None:
        weight = tensors[f"{layer}.weight"].float()
        for name in [each for each in tensors if each.startswith(f"{layer}.")]:
            tensors.pop(name)
        tensors[f"{layer}.weight"] = weight

    return lambda folder: change_tensors(folder, change)


def compressed(damage: Callable[[Path], object], error: type[HalError], message: str, scheme: Scheme = "w8a8") -> Case:
    return Case("compressed-tensors", scheme, damage, error, message)


def slim(damage: Callable[[Path], object], error: type[HalError], message: str, scheme: Scheme = "w8a8") -> Case:
    return Case("modelslim", scheme, damage, error, message)


CASES = {
    "another method": compressed(config(quant_method="hqq"), ConfigError, "quant_method 'hqq'.*hal supports float8"),
    "no method": compressed(config(quant_method=None), ConfigError, "has no quant_method"),
    "another format": compressed(config(format="pack-quantized"), ConfigError, "is 'pack-quantized', not 'int-quan"),
    "4 bits": compressed(group("weights", num_bits=4), ConfigError, "num_bits of the weights of group_0.* is 4, not 8"),
    "fp8": compressed(
        group("weights", type="float"), ConfigError, "group_0.* is 'int-quantized', not 'float-quantized'"
    ),
    "groups": compressed(group("weights", strategy="group", group_size=128), ConfigError, "'group', not 'channel'"),
    "a group size": compressed(group("weights", group_size=32), ConfigError, "'channel' with the group_size 32"),
    "asymmetric weights": compressed(group("weights", symmetric=False), ConfigError, "symmetric of the weights"),
    "a number for true": compressed(group("weights", symmetric=1), ConfigError, "symmetric of quantized weights is 1"),
    "weights only, yet with input scales": compressed(
        lambda folder: change_json(
            folder / "config.json",
            lambda value: value["quantization_config"]["config_groups"]["group_0"].update(input_activations=None),
        ),
        CheckpointError,
        "input_scale is not in the model",
    ),
    "weights only, packed": compressed(
        config(format="pack-quantized"), CheckpointError, "weight_packed is missing", "w8a16"
    ),
    "weights only, in 4 bits": compressed(
        group("weights", num_bits=4), CheckpointError, "q_proj.weight has numbers of more than 4 bits", "w8a16"
    ),
    "weights only, with an offset": slim(
        tensor(f"{DOWN}.weight_offset", torch.ones(32, 1)),
        CheckpointError,
        "weight_offset has values other than 0",
        "w8a16",
    ),
    "asymmetric tokens": compressed(
        group("input_activations", symmetric=False),
        ConfigError,
        "symmetric of the input_activations",
        "w8a8_dynamic",
    ),
    "static tokens": compressed(group("input_activations", strategy="token"), ConfigError, "'token', not 'tensor'"),
    "a local dynamic": compressed(
        group("input_activations", dynamic="local"),
        ConfigError,
        "dynamic of the input_activations.* is 'local', not",
    ),
    "a cache of an unknown type": compressed(
        config(kv_cache_scheme={"num_bits": 8}), ConfigError, "kv_cache_scheme in .* has the type None"
    ),
    "rotations": compressed(
        config(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        ConfigError,
        "has a transform_config",
    ),
    "sparse weights": compressed(
        config(sparsity_config={"format": "sparse-24-bitmask", "global_sparsity": 0.5, "sparsity_structure": "2:4"}),
        ConfigError,
        "has a sparsity_config",
    ),
    "a sparsity without format": compressed(
        config(sparsity_config={"global_sparsity": 0.5}), ConfigError, "has a sparsity_config"
    ),
    "two different sections": compressed(
        lambda folder: change_json(
            folder / "config.json", lambda value: value.update(compression_config=section("w8a16"))
        ),
        ConfigError,
        "quantization_config and a compression_config that differs",
    ),
    "no groups": compressed(config(config_groups={}), CheckpointError, "has no config_groups"),
    "a bad expression": compressed(config(ignore=["re:("]), CheckpointError, "the regular expression .* is not valid"),
    "ignore is no list": compressed(config(ignore="lm_head"), CheckpointError, "not a list of names"),
    "only a part ignored": compressed(
        widened(QUERY), CheckpointError, "into one are quantized differently: .*q_proj not, .*k_proj w8a8"
    ),
    "ignored, yet in int8": compressed(
        config(ignore=[DOWN]), CheckpointError, f"'{DOWN}' in ignore of .* excludes {DOWN}, which has quantized"
    ),
    "in floating point": compressed(
        tensor(f"{DOWN}.weight", torch.ones(32, 48)), CheckpointError, f"{DOWN}.weight is F32, expected int8"
    ),
    "no scale": compressed(tensor(f"{DOWN}.weight_scale", None), CheckpointError, f"{DOWN}.weight_scale is missing"),
    "no input scale": compressed(tensor(f"{DOWN}.input_scale", None), CheckpointError, "input_scale is missing"),
    "scales of groups": compressed(
        tensor(f"{DOWN}.weight_scale", torch.ones(32, 3)), CheckpointError, r"is \[32, 3\], not \[32, 1\]"
    ),
    "a scale of integers": compressed(
        tensor(f"{DOWN}.weight_scale", torch.ones(32, 1, dtype=torch.int8)),
        CheckpointError,
        "_scale is I8, expected a fl",
    ),
    "a weight offset": compressed(
        tensor(f"{DOWN}.weight_zero_point", torch.ones(32, 1, dtype=torch.int8)), CheckpointError, "are asymmetric"
    ),
    "an infinite scale": compressed(
        tensor(f"{DOWN}.weight_scale", torch.full((32, 1), math.inf)),
        CheckpointError,
        f"{DOWN}.weight_scale has values",
    ),
    "NaN for an input scale": compressed(
        tensor(f"{DOWN}.input_scale", torch.tensor([math.nan])),
        CheckpointError,
        "input_scale has values that are not posit",
    ),
    "an input offset out of range": compressed(
        tensor(f"{DOWN}.input_zero_point", torch.tensor([200], dtype=torch.int32)),
        CheckpointError,
        "other than integers",
    ),
    "different offsets": compressed(
        tensor(f"{QUERY}.input_zero_point", torch.tensor([3], dtype=torch.int8)),
        CheckpointError,
        "different input offsets: 3 of .*q_proj, -7 of .*k_proj",
    ),
    "an extra tensor": compressed(
        tensor(f"{DOWN}.g_idx", torch.ones(48)), CheckpointError, f"{DOWN}.g_idx is not in the model"
    ),
    "a dynamic one with an input scale": compressed(
        tensor(f"{DOWN}.input_scale", torch.ones(1)), CheckpointError, "input_scale is not in the model", "w8a8_dynamic"
    ),
    "no description": compressed(
        lambda folder: change_json(folder / "config.json", lambda value: value.pop("quantization_config")),
        CheckpointError,
        "weight is I8, expected a floating-point dtype.*no file describes how",
    ),
    "another type": slim(
        types({f"{DOWN}.weight": "W4A4"}), CheckpointError, "type 'W4A4' for .*down_proj.weight.*W8A8"
    ),
    "int4 weights without int8 activations": slim(
        types({f"{DOWN}.weight": "W4A16"}), CheckpointError, "type 'W4A16' for .*down_proj.weight.*no type of AscendV1"
    ),
    "layers of one, by ModelSlim": slim(
        lambda folder: [each(folder) for each in (types({f"{QUERY}.weight": "FLOAT"}), widened(QUERY))],
        CheckpointError,
        "quantized differently: .*q_proj not, .*k_proj w8a8",
    ),
    "a name that it lacks": slim(
        types({}, f"{DOWN}.weight"), CheckpointError, f"has no quantization type for {DOWN}.weight"
    ),
    "a quantized cache, by ModelSlim": slim(types({"kv_quant_type": "C8"}), ConfigError, "kv_quant_type 'C8'"),
    "a broken description": slim(
        lambda folder: (folder / DESCRIPTION).write_text("{"), CheckpointError, f"{DESCRIPTION} cannot be read"
    ),
    "a description that is a list": slim(
        lambda folder: (folder / DESCRIPTION).write_text("[]"), CheckpointError, "holds a list, not an object"
    ),
    "two descriptions": slim(
        lambda folder: shutil.copy(folder / DESCRIPTION, folder / "quant_model_description_w8a8.json"),
        CheckpointError,
        "holds 2 quantization descriptions",
    ),
    "described twice": slim(
        lambda folder: change_json(
            folder / "config.json", lambda value: value.update(quantization_config=section("w8a8"))
        ),
        CheckpointError,
        "describes its quantization twice",
    ),
    "no bias of integers": slim(tensor(f"{DOWN}.quant_bias", None), CheckpointError, f"{DOWN}.quant_bias is missing"),
    "a bias of floating point": slim(
        tensor(f"{DOWN}.quant_bias", torch.zeros(32)), CheckpointError, "quant_bias is F32, expected int32"
    ),
    "not float32 bit patterns": slim(
        tensor(f"{DOWN}.deq_scale", torch.full((32,), 1 << 40)), CheckpointError, "not float32 bit patterns"
    ),
    "a weight offset, by ModelSlim": slim(
        tensor(f"{DOWN}.weight_offset", torch.ones(32, 1)),
        CheckpointError,
        "weight_offset has values other",
        "w8a8_dynamic",
    ),
    "half an offset": slim(tensor(f"{DOWN}.input_offset", torch.tensor([0.5])), CheckpointError, "other than integers"),
}


def moved(old: str, new: str) -> Callable[[Path], object]:
    def change(value: dict[str, Any]) -> None:
        value[new] = value.pop(old)

    return lambda folder: change_json(folder / "config.json", change)


NEUTRAL = {
    "no sparsity": config(sparsity_config={}),
    "null": config(sparsity_config=None, transform_config=None, kv_cache_scheme=None),
    "dense": config(sparsity_config={"format": "dense"}),
    "dense, with statistics": config(
        sparsity_config={
            "format": "dense",
            "global_sparsity": 0.1455,
            "ignore": ["lm_head"],
            "registry_requires_subclass": False,
            "sparsity_structure": "unstructured",
            "targets": ["model.layers.1.self_attn.q_proj"],
        }
    ),
    "dense, 0:0": config(sparsity_config={"format": "dense", "global_sparsity": 0.0, "sparsity_structure": "0:0"}),
    "no rotations": config(transform_config={}),
    "no groups of rotations": config(transform_config={"config_groups": {}}),
    "no cache scheme": config(kv_cache_scheme={}),
    "one group of all columns": group("weights", group_size=-1),
    "the older name": moved("quantization_config", "compression_config"),
    "statistics and versions": config(
        global_compression_ratio=1.46, version="0.12.2", quantization_status="frozen", unknown=None
    ),
}
"""Changes of a compressed-tensors section that change nothing."""


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_key_without_effect_is_no_error(name: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "compressed-tensors", "w8a8")
    expected = logits(load(pair.folder))
    NEUTRAL[name](pair.folder)
    assert torch.equal(logits(load(pair.folder)), expected)


@thorough(MODE, r"\[w8a(16|8_dynamic)-")
@pytest.mark.parametrize("beside", [False, True], ids=["in config.json", "in both"])
@pytest.mark.parametrize("method", [{}, {"quant_method": "ascend"}], ids=["no method", "ascend"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_modelslim_description_in_config_json(
    scheme: Scheme, method: dict[str, Any], beside: bool, tmp_path: Path
) -> None:
    pair = make_pair(tmp_path, "modelslim", scheme)
    expected = logits(load(pair.folder))
    change_json(pair.folder / DESCRIPTION, lambda value: value.update(method))
    description = json.loads((pair.folder / DESCRIPTION).read_text())
    change_json(pair.folder / "config.json", lambda value: value.update(quantization_config=description))
    if not beside:
        (pair.folder / DESCRIPTION).unlink()
    assert torch.equal(logits(load(pair.folder)), expected)
    change_json(
        pair.folder / "config.json", lambda value: value["quantization_config"].update({f"{DOWN}.weight": "W4"})
    )
    message = "describes its quantization twice" if beside else "quantization_config in config.json has .* 'W4' for"
    with pytest.raises(CheckpointError, match=message):
        load(pair.folder)


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    pair = make_pair(tmp_path, case.format, case.scheme)
    case.damage(pair.folder)
    with pytest.raises(case.error, match=f"(?s){case.message}") as caught:
        load(pair.folder)
    assert caught.value.remedy


def test_a_bias_too_large(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "compressed-tensors", "w8a8", attention_bias=True)
    change_tensors(pair.folder, lambda tensors: tensors[f"{QUERY}.bias"].fill_(1e9))
    with pytest.raises(CheckpointError, match=f"the bias of {QUERY} does not fit into 32 bits"):
        load(pair.folder)


def test_a_model_of_its_own_kind_of_layer_stays(tmp_path: Path) -> None:
    """A subclass of Linear may compute something else, so it is not replaced, and the int8 weight does not fit."""
    from hal.models.qwen3 import Qwen3ForCausalLM

    class Scaled(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Own(Qwen3ForCausalLM):
        @classmethod
        def from_config(cls, config: Mapping[str, Any]) -> Qwen3ForCausalLM:
            model = super().from_config(config)
            model.set_submodule(DOWN, Scaled(48, 32))
            return model

    pair = make_pair(tmp_path, "compressed-tensors", "w8a8")
    with pytest.raises(CheckpointError, match=f"{DOWN}.weight is I8"):
        hal.load_model(pair.folder, hal.open("cpu"), model_class=Own)


LOADING = """
import sys, hal, hal.models.qwen3, hal.checkpoint.loading
backend = hal.open({"backend": "cpu", "dtype": "bfloat16", "options": {"pack_weights": False}})
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[1], backend)
tensors = [*model.parameters(), *model.buffers()]
print(backend.device.memory_stats().peak - before, sum(tensor.nbytes for tensor in tensors))
"""


@thorough(MODE, r"\[w8a8_dynamic|\[w8a8\]")
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_dynamic"])
def test_peak_memory_of_loading(scheme: Scheme, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    large_checkpoint.write(tmp_path / "plain", torch.bfloat16, num_hidden_layers=16)
    folder = quantize_checkpoint(tmp_path / "plain", tmp_path / "out", "w8a8_dynamic").path
    if scheme == "w8a8":
        tensors = load_file(folder / "model.safetensors")
        layers = [name.rpartition(".")[0] for name in tensors if name.endswith(".weight_scale")]
        save_file(tensors | {f"{name}.input_scale": torch.ones(1) for name in layers}, folder / "model.safetensors")
        change_json(folder / "config.json", lambda config: config.update(quantization_config=section("w8a8")))
    command = [sys.executable, "-c", LOADING, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights = map(int, result.stdout.split())
    assert weights > 300e6, "must be much more than is mapped at a time"
    assert peak < 1.15 * weights


# The trained checkpoint.


MADE = [("compressed-tensors", "w8a8"), ("modelslim", "w8a8"), ("compressed-tensors", "w8a8_dynamic")]


Made = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def trained(repository: Path) -> Path:
    """Return all layers of the trained checkpoint: its first ones do not predict text."""
    return repository / "checkpoints" / "tiny-python"


@pytest.fixture(scope="module")
def made(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Return a function that returns the trained checkpoint in a format and scheme, made once.

    It is calibrated on text on which it was trained.
    """
    folder = tmp_path_factory.mktemp("made")

    @functools.cache
    def make(format: str, scheme: str) -> Path:
        path, calibration = folder / f"{format} {scheme}", list[str]()
        if scheme == "w8a8":
            (folder / "text").write_text("".join(sorted(held_out.texts()[0], key=len)[300:310]), encoding="utf-8")
            calibration = ["--calibration", str(folder / "text")]
        arguments = [str(trained), str(path), "--scheme", scheme, "--format", format, *calibration]
        result = CliRunner().invoke(main, ["quantize", *arguments])
        assert result.exit_code == 0, result.stderr
        assert f"28 layers in {scheme}; weights: 6.3 MB before, 4." in result.stderr
        return path

    yield make
    shutil.rmtree(folder)


def runner_of(folder: Path, compiler: str = "eager") -> hal.Runner:
    compilation = {"compiler": compiler, "capture_sizes": [1, 4]}
    backend = hal.open({"backend": "cpu", "cache": {"num_tokens": 1088}, "compilation": compilation})
    return hal.Runner(hal.load_model(folder, backend), backend)


@pytest.fixture(scope="module")
def perplexity_in_bfloat16(trained: Path) -> float:
    return held_out.perplexity(runner_of(trained), held_out.tokens(Checkpoint.open(trained), 6000))


@thorough(EXHAUSTIVE, r"\[compressed-tensors w8a8")
@thorough(MODE, r"\[compressed")
@thorough(AGAIN, r"\[modelslim")
@pytest.mark.parametrize("key", MADE, ids=" ".join)
def test_perplexity_of_held_out_text(key: tuple[str, str], made: Made, perplexity_in_bfloat16: float) -> None:
    checkpoint = Checkpoint.open(made(*key))
    assert checkpoint.dtype == torch.bfloat16
    found = held_out.perplexity(runner_of(made(*key)), held_out.tokens(checkpoint, 6000))
    assert found == pytest.approx(perplexity_in_bfloat16, rel=0.02)
    assert found != perplexity_in_bfloat16


@thorough(MODE, r"\[compressed")
@pytest.mark.parametrize("key", MADE, ids=" ".join)
def test_graphs_compute_what_eager_does(key: tuple[str, str], made: Made) -> None:
    stream = held_out.tokens(Checkpoint.open(made(*key)), 4 * 64 + 1)
    eager, graph = (
        held_out.decoded_perplexity(runner_of(made(*key), compiler), stream, 4, 64) for compiler in ("eager", "graph")
    )
    assert graph == pytest.approx(eager, rel=1e-4)


@thorough(EXHAUSTIVE, r"\[compressed-tensors w8a8\]")
@thorough(MODE, r"\[compressed")
@pytest.mark.parametrize("key", MADE, ids=" ".join)
def test_generation(key: tuple[str, str], made: Made) -> None:
    """Greedy, by the command: the text is the same eagerly and with graphs, and most of it looks like Python."""
    arguments = ["generate", str(made(*key)), "--backend", "cpu", "--prompt", "def read_file(path):\n"]
    texts = [
        CliRunner().invoke(main, [*arguments, "--max-new-tokens", "40", "--compiler", compiler])
        for compiler in ("eager", "graph")
    ]
    assert [each.exit_code for each in texts] == [0, 0]
    assert texts[0].stdout == texts[1].stdout
    assert texts[0].stdout.startswith('    """')


def test_merged_layers_are_one(made: Made) -> None:
    """The parts of a merged layer have one input, so calibration gives them one scale and one offset."""
    tensors = all_tensors(made("modelslim", "w8a8"))
    for layer in range(4):
        for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            names = [f"model.layers.{layer}.{part}" for part in parts]
            assert len({tensors[f"{name}.input_scale"].item() for name in names}) == 1
            assert len({tensors[f"{name}.input_offset"].item() for name in names}) == 1
    assert any(tensors[name].item() for name in tensors if name.endswith("input_offset"))
    found = runner_of(made("modelslim", "w8a8")).model.modules()
    assert all(each.quantized for each in found if isinstance(each, MergedLinear))
