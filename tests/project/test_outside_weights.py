"""Tests for a form of weights of a separate package: by the reference, by a kernel that it adds, split and replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import EXPERTS, random_checkpoint, write_json
from helpers.quantized import error, kept_layers, wide
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.device.group import Group
from hal.nn import CausalLM
from hal.ops.kernels.partial_kernel import FormKernels
from hal.parallel import Mesh

pytestmark = pytest.mark.usefixtures("toys_installed")

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = [1, 7, 30, 4, 200, 19]
SIZES = {"hidden_size": 96, "intermediate_size": 192, "moe_intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 48}
GROUP = 48


def pair(folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """Write a checkpoint in 3 bits, packed here bit by bit, and the same with dequantized weights."""
    plain, quantized = (random_checkpoint(folder / name, **{**SIZES, **overrides}) for name in ("plain", "int3"))
    draw, floats, narrow = torch.Generator().manual_seed(3), load_file(plain / "model.safetensors"), {}
    for name, tensor in floats.items():
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer.rpartition(".")[2] not in PARTS:
            narrow[name] = tensor
            continue
        rows, width = tensor.shape
        numbers = torch.randint(-4, 4, (rows, width), generator=draw)
        scale = (torch.rand(rows, -(-width // GROUP), generator=draw) * 0.05 + 0.01).to(torch.float8_e4m3fn)
        floats[name] = numbers * scale.float().repeat_interleave(GROUP, 1)[:, :width]
        bits = (numbers + 4).unsqueeze(-1) >> torch.arange(3) & 1
        in_bytes = bits.reshape(rows, width // 8, 3, 8) << torch.arange(8)
        narrow |= {f"{layer}.codes": in_bytes.sum(-1).to(torch.uint8), f"{layer}.scale": scale}
    save_file(floats, plain / "model.safetensors")
    save_file(narrow, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    write_json(quantized / "config.json", {**config, "quantization_config": {"quant_method": "three_bits"}})
    return quantized, plain


def load(folder: Path, mesh: Mesh | None = None, **config: Any) -> CausalLM:
    given = {"backend": "cpu", "options": {"pack_weights": False}, **config}
    with hal.open(given, mesh=mesh or Mesh()) as backend:
        return hal.load_model(folder, backend)


def logits(folder: Path, compiler: str = "eager", **config: Any) -> Tensor:
    given = {"backend": "cpu", "compilation": {"compiler": compiler, "capture_sizes": [1]}, **config}
    with hal.open(given) as backend, hal.Runner(hal.load_model(folder, backend), backend) as runner:
        runner.step(runner.batch([TOKENS], [[1]]))
        return runner.step(runner.batch([[5]], [[1]], cached=[len(TOKENS)])).logits.clone()


@thorough(MODE, r"\[(inductor-dense|piecewise-biased|eager-experts)")
@thorough(EXHAUSTIVE, r"\[(graph-(dense|biased)|piecewise-(dense|experts)|inductor-(experts|biased))")
@pytest.mark.parametrize("overrides", [{}, EXPERTS, {"attention_bias": True}], ids=["dense", "experts", "biased"])
@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise", "inductor"])
def test_it_computes_as_the_dequantized_weights_do(compiler: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, **overrides)
    model, reference = load(quantized), load(plain)
    found = kept_layers(model)
    assert len(found) == 8
    for path, layer in found.items():
        assert torch.equal(wide(layer), reference.get_submodule(path).weight), path
    assert error(logits(quantized, compiler), logits(plain)) < 1e-5
    assert error(logits(quantized, compiler, quantized_weights="dequantized"), logits(plain)) < 1e-5


@pytest.mark.parametrize("overrides", [{}, EXPERTS], ids=["dense", "experts"])
def test_ranks_cut_its_groups(overrides: dict[str, Any], cpu: hal.Backend, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, **overrides)
    groups = [Group("pair", rank, 2, object()) for rank in range(2)]
    whole, parts = kept_layers(load(quantized)), [kept_layers(load(quantized, Mesh(tensor=each))) for each in groups]
    for path, layer in whole.items():
        mine = [wide(each[path]) for each in parts]
        dim = -1 if layer.shard == "in_features" else -2
        sizes = [mine[0].shape[-1]] if dim == -1 else list(parts[0][path].sizes)
        by_part = zip(*(each.split(sizes, dim) for each in mine), strict=True)
        assert torch.equal(torch.cat([rank for part in by_part for rank in part], dim), wide(layer)), path


def test_its_kernel_runs_before_the_drivers_own() -> None:
    """The driver's own kernels stay for other forms."""
    from hal_toys import three_bits

    backend = hal.open({"backend": "cpu", "dtype": "bfloat16"})
    kernels = backend.kernels["linear"]
    assert isinstance(kernels, FormKernels)
    assert kernels.kernels[0][0](three_bits.FORM)
    assert not kernels.kernels[0][0](hal.ops.Form("int8"))
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randint(-4, 4, (768, 480), generator=draw)
    scale = torch.rand(768, 10, generator=draw).to(torch.float8_e4m3fn).view(torch.uint8)
    x, weight = torch.randn(2, 480, generator=draw).bfloat16(), three_bits.pack(numbers)
    given = x, weight, None, scale, None, None, None, three_bits.FORM
    scales = scale.view(torch.float8_e4m3fn).float().repeat_interleave(GROUP, 1)
    for run in (hal.ops.linear, hal.ops.operation("linear").reference):
        assert error(run(*given).float(), x.float() @ (numbers * scales).t()) < 0.01
