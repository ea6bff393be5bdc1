"""Tests for quantized weights of a separate package: 4-bit groups and FP8 blocks, merged, stacked and split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from helpers.checkpoints import EXPERTS, random_checkpoint, write_json
from helpers.thorough import EXHAUSTIVE, MODE, thorough
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.checkpoint.loading import build_model
from hal.device.group import Group
from hal.errors import CheckpointError, ConfigError
from hal.nn import CausalLM, QuantizedLinear
from hal.parallel import Mesh

pytestmark = pytest.mark.usefixtures("toys_installed")

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FORMATS = ("compressed-tensors", "toy_awq")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
TOKENS = [1, 7, 30, 4, 200, 19]


def packed(numbers: Tensor) -> Tensor:
    """Pack eight numbers of the last dimension into an int32, the first in the lowest bits."""
    wide = sum(numbers[..., index::8].long() << (4 * index) for index in range(8))
    return torch.as_tensor(wide).to(torch.uint32).view(torch.int32)


@attrs.frozen
class Stored:
    """A layer in 4 bits: numbers, zero points and scales, which are powers of 2, so that sums are exact."""

    numbers: Tensor
    zero: Tensor
    scale: Tensor

    @classmethod
    def drawn(cls, rows: int, width: int, group: int, draw: torch.Generator) -> Stored:
        groups = -(-width // group)
        return cls(
            torch.randint(0, 16, (rows, width), generator=draw),
            torch.randint(0, 16, (rows, groups), generator=draw),
            2.0 ** -torch.randint(5, 9, (rows, groups), generator=draw),
        )

    def dequantized(self, group: int) -> Tensor:
        width = self.numbers.shape[1]
        zero, scale = (each.repeat_interleave(group, 1)[:, :width] for each in (self.zero, self.scale))
        return (self.numbers - zero) * scale

    def entries(self, format: str) -> dict[str, Tensor]:
        """Return the tensors, as each format's documentation specifies them."""
        if format == "compressed-tensors":  # zero points are packed along the rows
            zero = packed(self.zero.t()).t()
            return {"weight_packed": packed(self.numbers), "weight_scale": self.scale, "weight_zero_point": zero}
        numbers, zero = (
            each.t().unflatten(1, (-1, 8))[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1)
            for each in (self.numbers, self.zero)
        )
        return {"qweight": packed(numbers), "scales": self.scale.t(), "qzeros": packed(zero)}


def section(format: str, group: int) -> dict[str, Any]:
    if format == "toy_awq":
        return {"quant_method": "toy_awq", "group_size": group}
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": group}
    return {
        "quant_method": format,
        "format": "toy-packed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def pair(folder: Path, format: str, group: int, **overrides: Any) -> tuple[Path, Path]:
    """Write a checkpoint in 4 bits, and the same with dequantized weights."""
    plain, quantized = (random_checkpoint(folder / name, **overrides) for name in ("plain", "int4"))
    draw, wide, narrow = torch.Generator().manual_seed(3), load_file(plain / "model.safetensors"), {}
    for name, tensor in wide.items():
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer.rpartition(".")[2] not in PARTS:
            narrow[name] = tensor
            continue
        stored = Stored.drawn(*tensor.shape, group, draw)
        wide[name] = stored.dequantized(group)
        narrow |= {f"{layer}.{each}": value.contiguous() for each, value in stored.entries(format).items()}
    save_file(wide, plain / "model.safetensors")
    write(quantized, narrow, section(format, group))
    return quantized, plain


def write(folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    save_file(dict(tensors), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": described})


def load(folder: Path, mesh: Mesh | None = None, experts: str = "split") -> CausalLM:
    config = {"backend": "cpu", "options": {"pack_weights": False}}
    if experts != "split":
        config["parallel"] = {"tensor": 2, "experts": experts}
    with hal.open(config, mesh=mesh or Mesh()) as backend:
        return hal.load_model(folder, backend)


def logits(folder: Path) -> Tensor:
    with (
        hal.open({"backend": "cpu", "options": {"pack_weights": False}}) as backend,
        hal.Runner(hal.load_model(folder, backend), backend) as runner,
    ):
        return runner.step(runner.batch([TOKENS], [[1]]), hal.step.ALL).logits.clone()


def layers(model: CausalLM) -> dict[str, QuantizedLinear]:
    return {path: each for path, each in model.named_modules() if isinstance(each, QuantizedLinear)}


@thorough(MODE, r"\[toy_awq-(dense|biased)")
@thorough(EXHAUSTIVE, r"\[(compressed-tensors-(biased|dense)|toy_awq-experts)")
@pytest.mark.parametrize("overrides", [{}, EXPERTS, {"attention_bias": True}], ids=["dense", "experts", "biased"])
@pytest.mark.parametrize("format", FORMATS)
def test_merged_and_stacked_layers_are_those_of_the_dequantized_weights(
    format: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """The two formats store the same numbers in different axes, orders and packings."""
    quantized, plain = pair(tmp_path, format, 16, **overrides)
    model, reference = load(quantized), load(plain)
    found = layers(model)
    assert len(found) == 8
    for path, layer in found.items():
        assert torch.equal(layer.dequantized(), reference.get_submodule(path).weight), path  # type: ignore[operator]
    assert torch.equal(logits(quantized), logits(plain))


def ranks(folder: Path, experts: str = "split") -> list[CausalLM]:
    """Load the parts of two ranks in this process. They compute nothing together."""
    groups = [Group("pair", rank, 2, object()) for rank in range(2)]
    meshes = [Mesh(tensor=each, **({} if experts == "split" else {"expert": each})) for each in groups]
    return [load(folder, mesh, experts) for mesh in meshes]


def joined(parts: list[Tensor], layer: QuantizedLinear) -> Tensor:
    """Return the output of a whole layer from those of its ranks."""
    if layer.shard == "in_features":
        return parts[0] + parts[1]
    by_part = zip(*(each.split(list(layer.sizes), -1) for each in parts), strict=True)
    return torch.cat([rank for part in by_part for rank in part], -1)


@pytest.mark.parametrize("overrides", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("format", FORMATS)
def test_ranks_cut_groups_as_they_cut_columns(
    format: str, overrides: dict[str, Any], cpu: hal.Backend, tmp_path: Path
) -> None:
    """The numbers are such that sums are exact in any order. An expert's 16 inputs are one group of both ranks."""
    quantized, _ = pair(tmp_path, format, 16 if overrides else 8, **overrides)
    whole, parts = layers(load(quantized)), [layers(each) for each in ranks(quantized)]
    assert len(whole) == 8
    cpu.activate()
    for path, layer in whole.items():
        x = torch.randint(-4, 5, (6, layer.in_features), generator=torch.Generator().manual_seed(1)).float()
        counts = [] if layer.num_experts is None else [torch.tensor([2, 0, 1, 0, 0, 3, 0, 0])]
        mine = []
        for rank, part in enumerate(each[path] for each in parts):
            part.group = None
            mine.append(part(x.chunk(2, -1)[rank] if layer.shard == "in_features" else x, *counts))
        assert torch.equal(joined(mine, parts[0][path]), layer(x, *counts)), path


@pytest.mark.parametrize("format", FORMATS)
def test_ranks_that_hold_whole_experts(format: str, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, format, 16, **EXPERTS)
    whole, parts = layers(load(quantized)), [layers(each) for each in ranks(quantized, "all_gather")]
    stacked = [path for path, layer in whole.items() if layer.num_experts is not None]
    assert len(stacked) == 4
    for path in stacked:
        mine = torch.cat([each[path].dequantized() for each in parts])  # type: ignore[operator]
        assert torch.equal(mine, whole[path].dequantized())  # type: ignore[operator]


def test_a_cut_inside_a_group_is_refused(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, "compressed-tensors", 16)
    message = r"down_proj.weight_scale: a cut between 2 ranks at element 24 of in_features is inside a group of 16"
    with pytest.raises(ConfigError, match=message):
        ranks(quantized)


def test_what_the_formats_refuse(tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, "compressed-tensors", 16)
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    write(quantized, {**tensors, name: torch.ones(32, 2)}, section("compressed-tensors", 16))
    with pytest.raises(CheckpointError, match=rf"{name} is \[32, 2\], not \[32, 3\]"):
        build_model(hal.Checkpoint.open(quantized))
    write(quantized, tensors, section("compressed-tensors", 0))
    with pytest.raises(ConfigError, match="the group_size is 0"):
        build_model(hal.Checkpoint.open(quantized))
    write(quantized, tensors, section("compressed-tensors", 32))
    with pytest.raises(CheckpointError, match=r"weight_scale is \[.*\], not"):
        build_model(hal.Checkpoint.open(quantized))
    groups = section("compressed-tensors", 16)
    both = groups["config_groups"]
    both["queries"] = {**both["group_0"], "targets": ["re:.*q_proj"]}
    both["queries"]["weights"] = {**both["queries"]["weights"], "group_size": 8}
    write(quantized, tensors, groups)
    with pytest.raises(CheckpointError, match=r"into one are quantized differently: .*q_proj toy_int4"):
        build_model(hal.Checkpoint.open(quantized))
    write(quantized, tensors, {"quant_method": "hqq"})
    with pytest.raises(ConfigError, match=r"(?s)'hqq'.*in the formats awq and .* and toy_awq"):
        build_model(hal.Checkpoint.open(quantized))


def fp8_pair(folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """Write a checkpoint in FP8, with a scale for each block of 16 x 16, and the same with dequantized weights."""
    plain, quantized = (random_checkpoint(folder / name, **overrides) for name in ("plain", "fp8"))
    draw, wide = torch.Generator().manual_seed(5), load_file(plain / "model.safetensors")
    narrow: dict[str, Tensor] = {}
    for name, tensor in wide.items():
        layer, _, suffix = name.rpartition(".")
        narrow[name] = tensor
        if suffix == "weight" and layer.rpartition(".")[2] in PARTS:
            rows, columns = tensor.shape
            narrow[name] = tensor.to(torch.float8_e4m3fn)
            scale = 2.0 ** -torch.randint(0, 3, (-(-rows // 16), -(-columns // 16)), generator=draw)
            narrow[f"{name}_scale_inv"] = scale
            each = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
            wide[name] = narrow[name].float() * each
    save_file(wide, plain / "model.safetensors")
    write(quantized, narrow, {"quant_method": "toy_fp8", "weight_block_size": [16, 16]})
    return quantized, plain


@thorough(MODE, r"\[(ragged|experts)")
@pytest.mark.parametrize("overrides", [{}, EXPERTS, {"hidden_size": 40}], ids=["dense", "experts", "ragged"])
def test_blocks(overrides: dict[str, Any], tmp_path: Path) -> None:
    """In the ragged model, the last block of some rows and of some columns has 8 elements."""
    quantized, plain = fp8_pair(tmp_path, **overrides)
    model, reference = load(quantized), load(plain)
    found = layers(model)
    assert len(found) == 8
    for path, layer in found.items():
        assert torch.equal(layer.dequantized(), reference.get_submodule(path).weight), path  # type: ignore[operator]
    assert torch.equal(logits(quantized), logits(plain))


def test_ranks_cut_blocks(tmp_path: Path) -> None:
    quantized, _ = fp8_pair(tmp_path, intermediate_size=64)
    whole, parts = layers(load(quantized)), [layers(each) for each in ranks(quantized)]
    for path, layer in whole.items():
        shared = [each[path].dequantized() for each in parts]  # type: ignore[operator]
        dim = -1 if layer.shard == "in_features" else -2
        sizes = [shared[0].shape[-1]] if dim == -1 else list(parts[0][path].sizes)
        by_part = zip(*(each.split(sizes, dim) for each in shared), strict=True)
        found = torch.cat([rank for part in by_part for rank in part], dim)
        assert torch.equal(found, layer.dequantized()), path  # type: ignore[operator]


def test_merged_parts_that_do_not_fill_their_blocks_are_refused(tmp_path: Path) -> None:
    quantized, _ = fp8_pair(tmp_path, intermediate_size=40)
    message = r"gate_up_proj.weight_scale_inv: a part starts at element 40 of out_features, inside a group of 16"
    with pytest.raises(ConfigError, match=message):
        load(quantized)
