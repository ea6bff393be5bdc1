"""Tests for quantized projections of experts: what hal quantize writes, what is loaded, and what it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import EXPERTS, random_checkpoint
from helpers.quantized import error, wide
from helpers.reference import open_runner
from safetensors.torch import load_file, save_file

import hal
from hal.errors import CheckpointError
from hal.nn import Gate, GroupedLinear
from hal.quantization.forms import NAMES
from hal.quantize.quantize_checkpoint import quantize_checkpoint
from hal.step import ALL

FORMATS: tuple[str, ...] = ("compressed-tensors", "modelslim")
SCHEMES = ("w8a16", "w8a8", "w8a8_dynamic")
TOKENS = list(range(3, 40))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("experts") / "plain", **EXPERTS, mlp_only_layers=[0])


@pytest.fixture(scope="module", params=[(scheme, each) for scheme in SCHEMES for each in FORMATS], ids=str)
def quantized(request: pytest.FixtureRequest, plain: Path) -> tuple[str, str, Path]:
    scheme, form = request.param
    target = plain.parent / f"{scheme}-{form}"
    text = "def read(path):\n    return open(path).read()\n" * 20 if scheme == "w8a8" else None
    made = quantize_checkpoint(plain, target, scheme, format=form, calibration=text)
    assert made.layers == 2 * 4 + 3 + 8 * 3  # attention's of both layers, the dense MLP's, and the experts'
    return scheme, form, target


def logits(path: Path, compiler: str = "eager") -> torch.Tensor:
    runner = open_runner(path, compiler)
    return runner.step(runner.batch([TOKENS], [list(range(1, 11))]), ALL).logits.clone()


def test_all_experts_of_a_layer_share_a_layer(quantized: tuple[str, str, Path]) -> None:
    scheme, _, path = quantized
    model = open_runner(path).model
    found = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    assert [each.form for each in found] == [NAMES[scheme][0]] * 2
    assert [tuple(each.weight.shape) for each in found] == [(8, 32, 32), (8, 32, 16)]
    assert {each.weight.dtype for each in found} == {torch.int8}


def test_gates_stay_and_other_readers_are_told(quantized: tuple[str, str, Path]) -> None:
    _, form, path = quantized
    assert [name for name, module in open_runner(path).model.named_modules() if isinstance(module, Gate)] == [
        "model.layers.1.mlp.gate"
    ]
    if form == "compressed-tensors":
        ignored = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
        assert ignored == ["lm_head", "model.layers.1.mlp.gate"]
    else:
        types = json.loads((path / "quant_model_description.json").read_text())
        assert types["model.layers.1.mlp.gate.weight"] == "FLOAT"


def test_logits_are_near_those_of_the_floating_point_model(quantized: tuple[str, str, Path], plain: Path) -> None:
    """Static scales are those of another text."""
    scheme, _, path = quantized
    assert 0 < error(logits(path), logits(plain)) < (0.3 if scheme == "w8a8" else 0.1)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8_dynamic"])
def test_weights_are_the_rounded_ones(scheme: str, plain: Path, tmp_path: Path) -> None:
    """With activations of 8 bits, logits are nearer to those of a model of the rounded weights; else they are equal."""
    path = tmp_path / "int8"
    quantize_checkpoint(plain, path, scheme)
    tensors = load_file(path / "model.safetensors")
    rounded = {
        name: tensor.float() * tensors[f"{name}_scale"] if tensor.dtype == torch.int8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }
    dequantized = random_checkpoint(tmp_path / "rounded", **EXPERTS, mlp_only_layers=[0])
    save_file(rounded, dequantized / "model.safetensors")
    found, near, far = logits(path), logits(dequantized), logits(plain)
    assert (found - near).square().mean() < (found - far).square().mean()
    if scheme == "w8a16":
        assert error(found, near) < 1e-5
        assert error(logits(path, "graph"), near) < 1e-5
    model, dense = open_runner(path).model, open_runner(dequantized).model
    experts = model.get_submodule("model.layers.1.mlp.experts.down_proj")
    expected = dense.get_submodule("model.layers.1.mlp.experts.down_proj").weight
    torch.testing.assert_close(wide(experts), expected)


def test_experts_of_one_layer_are_quantized_alike(tmp_path: Path, plain: Path) -> None:
    path = tmp_path / "mixed"
    quantize_checkpoint(plain, path, "w8a8_dynamic", format="modelslim")
    file = path / "quant_model_description.json"
    types = json.loads(file.read_text())
    types["model.layers.1.mlp.experts.3.up_proj.weight"] = "W8A16"
    file.write_text(json.dumps(types))
    with pytest.raises(CheckpointError, match=r"quantized differently: .*experts\.3\.up_proj w8a16"):
        hal.load_model(path, hal.open("cpu"))
