"""Tests for weights of GGUF files that stay packed, or are quantized anew, against the dequantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from helpers.checkpoints import random_checkpoint
from helpers.gguf_writing import write_gguf
from helpers.low_bits import DENSE, SPARSE
from helpers.quantized import check_ranks, error, kept_layers, wide
from helpers.thorough import EXHAUSTIVE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.device.group import Group
from hal.errors import CheckpointError
from hal.nn import CausalLM, GroupedLinear
from hal.parallel import Mesh
from hal.quantization.forms import NAMES

TOKENS = [1, 7, 30, 4, 200, 19]
KINDS = {"Q4_0": torch.int32, "Q4_1": torch.int32, "Q5_0": torch.int8, "Q5_1": torch.int8, "Q8_0": torch.int8}
K_QUANTS = {"Q4_K": (torch.int32, 32), "Q5_K": (torch.int8, 32), "Q6_K": (torch.int8, 16)}
WITHOUT_BIAS = {**DENSE, "attention_bias": False}


def load(file: Path, mesh: Mesh | None = None, weights: str = "kept") -> CausalLM:
    options = {"native": False, "pack_weights": False}  # weights in their plain layout
    config = {"backend": "cpu", "dtype": "float32", "quantized_weights": weights, "options": options}
    with hal.open(config, mesh=mesh or Mesh()) as backend:
        return hal.load_model(file, backend)


def logits(file: Path, weights: str, compiler: str = "eager") -> Tensor:
    config = {"backend": "cpu", "dtype": "float32", "quantized_weights": weights, "compilation": {"compiler": compiler}}
    with hal.open(config) as backend, hal.Runner(hal.load_model(file, backend), backend) as runner:
        return runner.step(runner.batch([TOKENS], [[1]]), hal.step.ALL).logits.clone()


@thorough(EXHAUSTIVE, r"\[sparse-(Q4_0|Q5_0|Q8_0)|\[dense-(Q5_1|Q4_1)")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overrides", [WITHOUT_BIAS, SPARSE], ids=["dense", "sparse"])
def test_kept_weights_are_the_dequantized_ones(overrides: dict[str, Any], kind: str, tmp_path: Path) -> None:
    file = write_gguf(random_checkpoint(tmp_path / "plain", **overrides), tmp_path / "model.gguf", kind=kind)
    model = load(file)
    found = kept_layers(model)
    assert len(found) == 9
    assert found["model.embed_tokens.table"].out_features == model.vocab_size
    assert not any(each.numel() >= model.vocab_size for each in model.parameters())
    assert {each.form.columns for each in found.values()} == {32}
    assert {each.weight.dtype for each in found.values()} == {KINDS[kind]}
    assert all((each.weight_zero_point is None) == kind.endswith("_0") for each in found.values())
    assert not kept_layers(load(file, weights="auto"))
    assert error(logits(file, "kept"), logits(file, "auto")) < 1e-5


def test_an_output_projection_of_its_own_stays_packed(tmp_path: Path) -> None:
    plain = random_checkpoint(tmp_path / "plain", **WITHOUT_BIAS, tie_word_embeddings=False)
    file = write_gguf(plain, tmp_path / "model.gguf", kind="Q8_0")
    model = load(file)
    found = kept_layers(model)
    assert len(found) == 9
    assert found["lm_head"].weight.dtype is torch.int8
    assert model.get_parameter("model.embed_tokens.weight").dtype is torch.float32
    assert error(logits(file, "kept"), logits(file, "auto")) < 1e-5


@thorough(EXHAUSTIVE, r"\[sparse-Q[56]")
@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize("overrides", [WITHOUT_BIAS, SPARSE], ids=["dense", "sparse"])
def test_kept_k_quants_are_the_dequantized_ones(overrides: dict[str, Any], kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "num_hidden_layers": 1}
    sizes |= {"moe_intermediate_size": 256, "num_experts": 4} if overrides is SPARSE else {"intermediate_size": 256}
    file = write_gguf(random_checkpoint(tmp_path / "plain", **{**overrides, **sizes}), tmp_path / "k.gguf", kind=kind)
    found = kept_layers(load(file))
    assert len(found) == 5
    assert {(each.weight.dtype, each.form.columns) for each in found.values()} == {K_QUANTS[kind]}
    assert all((each.weight_zero_point is None) == (kind == "Q6_K") for each in found.values())
    assert error(logits(file, "kept"), logits(file, "auto")) < 1e-5


@thorough(EXHAUSTIVE, r"\[(?!Q4_1-graph)")
@pytest.mark.parametrize("compiler", ["graph", "piecewise", "piecewise_eager", "inductor"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_compiled_steps(kind: str, compiler: str, tmp_path: Path) -> None:
    file = write_gguf(random_checkpoint(tmp_path / "plain", **SPARSE), tmp_path / "model.gguf", kind=kind)
    assert error(logits(file, "kept", compiler), logits(file, "auto")) < 1e-5


def test_constant_blocks(tmp_path: Path) -> None:
    """A block whose numbers are equal has the scale 0, and only a minimum."""
    folder = random_checkpoint(tmp_path / "plain", **WITHOUT_BIAS)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensor[3, :32], tensor[4, 32:64] = 0.25, 0.0
    save_file(tensors, folder / "model.safetensors")
    for kind in ("Q4_1", "Q5_1", "Q4_0"):
        file = write_gguf(folder, tmp_path / f"{kind}.gguf", kind=kind)
        assert error(logits(file, "kept"), logits(file, "auto")) < 1e-5


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_weights_that_are_quantized_anew(kind: str, tmp_path: Path) -> None:
    """Any type of a file becomes int8. Types without blocks of 32 are dequantized where weights are kept."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 2, "num_hidden_layers": 1}
    folder = random_checkpoint(tmp_path / "plain", **{**SPARSE, **sizes})
    file = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    assert bool(kept_layers(load(file))) == (kind == "Q8_0")
    exact = load(file, weights="auto")
    for target in ("w8a16", "w8a8_dynamic"):
        found = kept_layers(load(file, weights=target))
        assert len(found) == 4
        for path, layer in found.items():
            assert layer.form == NAMES[target][0]
            assert error(wide(layer), exact.get_submodule(path).weight) < 0.015
    assert isinstance(exact.get_submodule("model.layers.0.mlp.experts.down_proj"), GroupedLinear)


def test_ranks_cut_blocks(cpu: hal.Backend, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "plain", **SPARSE)
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_1")
    groups = [Group("pair", rank, 2, object()) for rank in range(2)]
    whole, parts = kept_layers(load(file)), [kept_layers(load(file, Mesh(tensor=each))) for each in groups]
    cpu.activate()
    check_ranks(whole, parts)


def test_ranks_cut_inside_blocks(cpu: hal.Backend, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "plain", **{**WITHOUT_BIAS, "intermediate_size": 96})
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_1")
    path = "model.layers.1.mlp.down_proj"
    whole = kept_layers(load(file))[path]
    parts = [kept_layers(load(file, Mesh(tensor=Group("pair", rank, 2, object()))))[path] for rank in range(2)]
    assert {each.form.columns for each in parts} == {16}
    assert error(torch.cat([wide(each) for each in parts], -1), wide(whole)) < 1e-6


@pytest.mark.parametrize("weights", ["kept", "auto", "w8a16"])
@pytest.mark.parametrize(
    ("overrides", "missing", "named"),
    [
        (WITHOUT_BIAS, "blk.1.ffn_up.weight", r"layers\.1\.mlp\.up_proj\.weight"),
        (SPARSE, "blk.1.ffn_up_exps.weight", r"layers\.1\.mlp\.experts\.0\.up_proj\.weight"),
        (WITHOUT_BIAS, "output_norm.weight", r"model\.norm\.weight"),
        (WITHOUT_BIAS, "token_embd.weight", r"has no token_embd\.weight"),
    ],
)
def test_a_tensor_that_is_missing(
    overrides: dict[str, Any], missing: str, named: str, weights: str, tmp_path: Path
) -> None:
    folder = random_checkpoint(tmp_path / "plain", **overrides)
    file = write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0", without=[missing])
    with pytest.raises(CheckpointError, match=named) as raised:
        load(file, weights=weights)
    assert raised.value.remedy == "give the file of a whole model"


@pytest.mark.parametrize("weights", ["kept", "auto", "w8a16"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_scale_that_is_not_finite_is_refused(kind: str, weights: str, tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "plain", **WITHOUT_BIAS)
    file = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    tensor = next(each for each in GGUFReader(file).tensors if each.name == "blk.1.ffn_down.weight")
    data = bytearray(file.read_bytes())
    for damage in (b"\x00\x7c", b"\x01\x7c"):  # infinity and NaN in float16
        data[tensor.data_offset : tensor.data_offset + 2] = damage
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight .* scale is not finite"):
            load(file, weights=weights)
