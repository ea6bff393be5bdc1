"""Checkpoints of NVIDIA's ModelOpt: each algorithm, both places of the description, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.low_bits import DENSE, DOWN, INPUT, MODELOPT, SPARSE, Format, load, logits, pair, ranks
from helpers.quantized import change_json, check_ranks, error, kept_layers
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.errors import CheckpointError, ConfigError, HalError
from hal.ops.forms import Form

FORMS = {
    "FP8": Form("float8", inputs="static_float8"),
    "FP8_PB_WO": Form("float8", rows=32, columns=32),
    "FP8_PER_CHANNEL_PER_TOKEN": Form("float8", inputs="float8"),
    "MXFP8": Form("float8", columns=32, scales="e8m0"),
    "NVFP4": Form("float4", columns=16, scales="e4m3", second=True),
}


def algorithm(name: str) -> Format:
    return Format(name, group=MODELOPT[name])


@pytest.mark.parametrize("overrides", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", MODELOPT)
def test_weights_are_those_of_the_file(name: str, overrides: dict[str, Any], cpu: hal.Backend, tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, algorithm(name), **overrides)
    whole = kept_layers(load(quantized))
    assert len(whole) == 8
    assert {each.form for each in whole.values()} == {FORMS[name]}
    assert error(logits(quantized, quantized_weights="dequantized"), logits(plain)) < 1e-6
    if FORMS[name].inputs == "float":
        assert error(logits(quantized), logits(plain)) < 1e-5
    exact, parts = load(plain), [kept_layers(each) for each in ranks(quantized)]
    cpu.activate()
    if name != "FP8_PER_CHANNEL_PER_TOKEN":  # Ranks that share inputs have other scales of activations.
        check_ranks(whole, parts)
    for path, layer in whole.items() if name == "FP8" else ():
        x = torch.randn(6, layer.in_features, generator=torch.Generator().manual_seed(1)) * 10  # Some are beyond.
        counts = [] if layer.num_experts is None else [torch.tensor([2, 0, 1, 3])]
        numbers = (x / INPUT).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert error(layer(x, *counts), exact.get_submodule(path)(numbers * INPUT, *counts)) < 1e-5, path


@pytest.mark.parametrize("place", ["both", "file", "named in config.json"])
def test_places_of_the_description(place: str, tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, algorithm("NVFP4"), **DENSE)
    section = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (quantized / "hf_quant_config.json").write_text(json.dumps(section))

    def change(config: dict[str, Any]) -> None:
        if place == "file":
            del config["quantization_config"]
        elif place != "both":
            config["quantization_config"] = {"quant_method": "modelopt"}

    change_json(quantized / "config.json", change)
    assert error(logits(quantized), logits(plain)) < 1e-5


def test_layers_of_several_algorithms(tmp_path: Path) -> None:
    """The layers of a module may be named by the module."""
    quantized, plain = pair(tmp_path, algorithm("NVFP4"), **DENSE)
    wide, narrow = load_file(plain / "model.safetensors"), load_file(quantized / "model.safetensors")
    for name in [each for each in narrow if each.startswith(DOWN)]:
        del narrow[name]
    found, wide[f"{DOWN}.weight"] = algorithm("FP8_PB_WO").quantized(
        wide[f"{DOWN}.weight"], torch.Generator().manual_seed(1)
    )
    save_file(narrow | {f"{DOWN}.{name}": each for name, each in found.items()}, quantized / "model.safetensors")
    save_file(wide, plain / "model.safetensors")
    floats, modules = {"quant_algo": "FP8_PB_WO", "group_size": 32}, [f"model.layers.{layer}" for layer in range(2)]
    layers = {**{each: {"quant_algo": "NVFP4", "group_size": 16} for each in modules}, DOWN: floats}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    change_json(quantized / "config.json", lambda config: config.update(quantization_config=section))
    assert {each.form for each in kept_layers(load(quantized)).values()} == {FORMS["NVFP4"], FORMS["FP8_PB_WO"]}
    assert error(logits(quantized), logits(plain)) < 1e-5


@pytest.mark.parametrize("method", ["compressed-fp8", "fp8"])
def test_other_descriptions_of_static_activations(method: str, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, algorithm("FP8"), **DENSE)
    expected, section = logits(quantized), Format(method, group=-1, activations=True).section()
    if method == "fp8":
        section["activation_scheme"] = "static"
    else:
        section["config_groups"]["group_0"]["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    change_json(quantized / "config.json", lambda config: config.update(quantization_config=section))
    assert torch.equal(logits(quantized), expected)


def test_caches_with_scales(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, algorithm("FP8"), **DENSE)
    kept = logits(quantized)
    tensors = load_file(quantized / "model.safetensors")
    scales: dict[str, Tensor] = {
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale": torch.tensor(0.02)
        for layer in range(2)
        for part in "kv"
    }
    save_file(tensors | scales, quantized / "model.safetensors")
    change_json(quantized / "config.json", lambda each: each["quantization_config"].update(kv_cache_quant_algo="FP8"))
    assert 1e-6 < error(logits(quantized), kept) < 0.1
    assert error(logits(quantized, cache={"dtype": "model"}), kept) == 0


def with_section(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update(changes)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"quant_algo": "W4A16_AWQ"}, ConfigError, "the quant_algo 'w4a16_awq', which hal does not support"),
        ({"quant_algo": None, "kv_cache_quant_algo": {}}, CheckpointError, "the lack of an entry in .* excludes"),
        ({"group_size": 32}, ConfigError, "group_size 32 of NVFP4"),
        ({"ignore": "lm_head"}, CheckpointError, "ignore of .* is 'lm_head', not a list of names"),
        (
            {"ignore": ["*.down_proj"]},
            CheckpointError,
            r"'\*\.down_proj' in ignore of .* excludes model\S*down_proj, which has",
        ),
        ({"quantized_layers": [3]}, CheckpointError, r"quantized_layers of .* is \[3\], not a table"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0": {"quant_algo": "NVFP4"}}},
            CheckpointError,
            "the lack of an entry in .* excludes model.layers.1",
        ),
    ],
)
def test_refused_descriptions(changes: dict[str, Any], kind: type[HalError], message: str, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, algorithm("NVFP4"), **DENSE)
    change_json(quantized / "config.json", with_section(**changes))
    with pytest.raises(kind, match=message):
        load(quantized)


def test_a_description_that_is_nowhere(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, algorithm("NVFP4"), **DENSE)
    section = {"quant_method": "modelopt"}
    change_json(quantized / "config.json", lambda config: config.update(quantization_config=section))
    with pytest.raises(CheckpointError, match=r"has no quant_algo, and .* has no hf_quant_config\.json"):
        load(quantized)
