"""Tests for mixtures of experts with int8 weights and floating activations, quantized in both formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers.quantized import (
    DESCRIPTION,
    FORMATS,
    Format,
    all_tensors,
    change_tensors,
    error,
    kept_layers,
    load,
    logits,
)
from helpers.thorough import EXHAUSTIVE, thorough
from safetensors.torch import save_file

import hal
from hal.cli import main
from hal.errors import CheckpointError
from hal.nn import GroupedLinear, Linear, Router
from hal.quantization.forms import INT8
from hal.testing.random_checkpoint import checkpoint

DOWN = "model.layers.1.mlp.experts.3.down_proj"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Return a Qwen3-MoE with a dense layer and a sparse one, whose prompts fit into its vocabulary."""
    folder = shutil.copytree(checkpoint("qwen3_moe", 16), tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    change_tensors(
        folder,
        lambda tensors: tensors.update({"model.embed_tokens.weight": torch.randn(256, 48, generator=draw) * 48**-0.5}),
    )
    return folder


def quantized(plain: Path, target: Path, format: Format) -> Path:
    result = CliRunner().invoke(main, ["quantize", str(plain), str(target), "--scheme", "w8a16", "--format", format])
    assert result.exit_code == 0, result.stderr
    assert "35 layers in w8a16" in result.stderr, "7 of the dense layer, 4 and 8 experts with 3 of the sparse one"
    return target


def dequantized(folder: Path, target: Path, plain: Path) -> Path:
    """Write the quantized checkpoint with the floating-point weights that its integers and scales stand for."""
    shutil.copytree(plain, target)
    tensors = all_tensors(folder)
    weights = {name: tensors[name] for name in all_tensors(plain)}
    integers = [name for name, values in weights.items() if values.dtype == torch.int8]
    weights |= {name: weights[name].float() * tensors[f"{name}_scale"] for name in integers}
    assert len(integers) == 35
    save_file(weights, target / "model.safetensors")
    return target


@thorough(EXHAUSTIVE, r"\[modelslim-graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
@pytest.mark.parametrize("format", FORMATS)
def test_logits_are_those_of_the_dequantized_weights(
    format: Format, compiler: str, plain: Path, tmp_path: Path
) -> None:
    folder = quantized(plain, tmp_path / "int8", format)
    model = load(folder)
    kept = kept_layers(model)
    assert [isinstance(each, GroupedLinear) for each in kept.values()].count(True) == 2
    assert (len(kept), {each.form for each in kept.values()}) == (8, {INT8})
    assert sum(isinstance(module, Router) for module in model.modules()) == 1
    assert kept["model.layers.1.mlp.experts.down_proj"].weight_scale.shape == (8, 48, 1)
    found = logits(model, compiler)
    assert error(found, logits(load(dequantized(folder, tmp_path / "float", plain)), compiler)) < 1e-5
    assert 1e-4 < error(found, logits(load(plain), compiler)) < 0.05


def test_in_bfloat16(plain: Path, tmp_path: Path) -> None:
    """Few rows and many take different products; both round like those of the dequantized weights."""
    folder = quantized(plain, tmp_path / "int8", "compressed-tensors")
    wide = load(dequantized(folder, tmp_path / "float", plain))
    model, draw = load(folder, dtype="bfloat16"), torch.Generator().manual_seed(1)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear) and module.quantized}
    assert len(layers) == 6
    for name, layer in layers.items():
        weight = wide.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        for rows in (1, 32, 33):
            x = torch.randn(rows, weight.shape[1], generator=draw).bfloat16()
            assert error(layer(x).float(), x.float() @ weight.t()) < 5e-3


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_scale_of_an_expert(format: Format, plain: Path, tmp_path: Path) -> None:
    folder = quantized(plain, tmp_path / "int8", format)
    assert (folder / DESCRIPTION).exists() == (format == "modelslim")
    change_tensors(folder, lambda tensors: tensors.pop(f"{DOWN}.weight_scale"))
    with pytest.raises(CheckpointError, match=rf"{DOWN}.weight_scale is missing"):
        hal.load_model(folder, hal.open("cpu"))
