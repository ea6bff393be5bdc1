"""Checkpoints of 8 and 4 bits in published formats, written without hal, and the same with dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.checkpoint.random_weights import RandomCheckpoint
from hal.device.group import Group
from hal.nn import CausalLM
from hal.parallel import Mesh
from helpers.checkpoints import EXPERTS, random_checkpoint, write_json
from helpers.quantized import PARTS, change_json

AWQ_SHIFTS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of each of eight outputs."""
DENSE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "attention_bias": True}
SPARSE: dict[str, Any] = {**EXPERTS, "hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32, "num_experts": 4}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "attention_bias": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
WHOLE = "int-quantized"
"""The method of compressed-tensors with each number in an int8."""
FLOAT4 = {
    "nvfp4-pack-quantized": ("tensor_group", 16, torch.float8_e4m3fn),
    "mxfp4-pack-quantized": ("group", 32, torch.uint8),
}
"""The strategies, groups and dtypes of scales of the methods of compressed-tensors with float4."""
MODELOPT = {"FP8": -1, "FP8_PB_WO": 32, "FP8_PER_CHANNEL_PER_TOKEN": 0, "MXFP8": 32, "NVFP4": 16}
"""The groups of the algorithms of ModelOpt, which are their methods here, as :attr:`Format.group` has them."""
TOKENS = [1, 7, 30, 4, 200, 19]
DOWN = "model.layers.1.mlp.down_proj"
INPUT = 0.03
"""The scale of static activations of ModelOpt."""
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers of the last dimension into int32, the first in the lowest bits."""
    each = 32 // bits
    wide = sum(numbers[..., index::each].long() << (bits * index) for index in range(each))
    return torch.as_tensor(wide).to(torch.uint32).view(torch.int32)


def spread(factors: Tensor, group: int, width: int) -> Tensor:
    return factors.repeat_interleave(group, 1)[:, :width]


@attrs.frozen
class Format:
    """How a checkpoint stores its layers.

    Attributes:
        method: ``quant_method``, with the version of GPTQ.
        bits: those of a number.
        group: the inputs of a group, 0 for a whole row; for float8, the sides of a block, 0 for a row, -1 for a tensor.
        symmetric: whether all zero points are half of the range.
        dtype: that of the scales.
        activations: whether the section has activations of 8 bits, by token.
        ordered: whether the inputs are grouped in another order (act-order).
    """

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    dtype: torch.dtype = torch.float32
    activations: bool = False
    ordered: bool = False

    @property
    def is_float(self) -> bool:
        return self.method.endswith("fp8")

    def section(self) -> dict[str, Any]:
        """Return the quantization_config."""
        size = self.group or -1
        if self.method.startswith("gptq"):
            given = {"bits": self.bits, "group_size": size, "desc_act": self.ordered, "sym": self.symmetric}
            return {"quant_method": "gptq", **given, "checkpoint_format": self.method}
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        if self.method == "fp8":
            block = [self.group] * 2 if self.group > 0 else None
            return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
        if self.is_float:
            weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
            weights |= {"strategy": {0: "channel", -1: "tensor"}.get(self.group, "block")}
            weights |= {"block_structure": [self.group] * 2 if self.group > 0 else None}
            return self._compressed(weights, "float", "float-quantized")
        if self.method in MODELOPT:
            kept = {"ignore": ["lm_head", "model.embed*"], "kv_cache_scheme": None}
            given = {"group_size": self.group} if self.group > 0 else {}
            return {"quant_method": "modelopt", "quant_algo": self.method, **given, **kept}
        if self.method in FLOAT4:
            strategy, size, _ = FLOAT4[self.method]
            weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
            return self._compressed({**weights, "group_size": size}, "float", self.method)
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        weights |= {"strategy": "group" if self.group else "channel", "group_size": self.group or None}
        weights |= {"actorder": "group"} if self.ordered else {}
        return self._compressed(weights, "int", "pack-quantized" if self.method == "compressed-tensors" else WHOLE)

    def _compressed(self, weights: dict[str, Any], kind: str, format: str) -> dict[str, Any]:
        tokens = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        inputs = tokens if self.activations else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }

    def quantized(self, weight: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Return a layer's tensors, with random numbers, and their weight in float32."""
        if self.method in MODELOPT:
            return self._modelopt(weight, draw)
        if self.method in FLOAT4:
            return self._float4(weight, draw)
        return self._float8(weight, draw) if self.is_float else self._integers(weight, draw)

    def _float4(self, weight: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, width = weight.shape
        _, size, dtype = FLOAT4[self.method]
        numbers = torch.randint(0, 256, (rows, width // 2), generator=draw, dtype=torch.uint8)
        values = torch.tensor(E2M1)[torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2).long()]
        found = {"weight_packed": numbers}
        if dtype is torch.uint8:
            bits = torch.randint(121, 125, (rows, width // size), generator=draw, dtype=torch.uint8)
            found["weight_scale"], scale = bits, 2.0 ** (bits.float() - 127)
        else:
            found["weight_scale"] = (torch.rand(rows, width // size, generator=draw) * 400 + 4).to(dtype)
            found["weight_global_scale"] = (torch.rand(1, generator=draw) + 0.5) * 1200 * width**0.5
            scale = found["weight_scale"].float() / found["weight_global_scale"]
        return found, values * spread(scale, size, width)

    def _modelopt(self, weight: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        if self.method == "NVFP4":
            found, wide = Format("nvfp4-pack-quantized")._float4(weight, draw)
            names = {"weight": found["weight_packed"], "weight_scale": found["weight_scale"]}
            return names | {
                "weight_scale_2": 1 / found["weight_global_scale"][0],
                "input_scale": torch.tensor(INPUT),
            }, wide
        if self.method == "MXFP8":
            rows, width = weight.shape
            values = torch.randn(rows, width, generator=draw).mul(100).to(torch.float8_e4m3fn)
            bits = torch.randint(110, 114, (rows, width // 32), generator=draw, dtype=torch.uint8)
            wide = values.float() * spread(2.0 ** (bits.float() - 127), 32, width)
            return {"weight": values, "weight_scale": bits}, wide
        found, wide = attrs.evolve(self, method="compressed-fp8", group=MODELOPT[self.method])._float8(weight, draw)
        if self.method == "FP8_PB_WO":
            found["weight_scale"] = found["weight_scale"][:, None, :, None]
        elif self.method == "FP8":
            found["input_scale"] = torch.tensor(INPUT)
        else:
            found["weight_scale"] = found["weight_scale"][:, 0]
        return found, wide

    def _integers(self, weight: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        (rows, width), group, most = weight.shape, self.group or weight.shape[1], 1 << self.bits
        groups = -(-width // group)
        numbers = torch.randint(0, most, (rows, width), generator=draw)
        zero = torch.randint(0, most, (rows, groups), generator=draw)
        if self.symmetric:
            zero = torch.full_like(zero, most // 2)
        scale = (torch.rand(rows, groups, generator=draw) + 0.5) * (2 / most * width**-0.5)
        scale = scale.to(self.dtype)
        index = torch.arange(width, dtype=torch.int32) // group
        if self.ordered:  # The same of all layers with as many inputs, since merged ones share it.
            index = index[torch.randperm(width, generator=torch.Generator().manual_seed(width))]
        wide = (numbers - zero[:, index]) * scale.float()[:, index]
        if self.method == WHOLE:
            found = {"weight": (numbers - most // 2).to(torch.int8), "weight_scale": scale}
            if not self.symmetric:
                found["weight_zero_point"] = (zero - most // 2).to(torch.int8)
            if self.ordered:
                found["weight_g_idx"] = index
        elif self.method == "compressed-tensors":
            found = {"weight_packed": packed(numbers, self.bits), "weight_scale": scale}
            found["weight_shape"] = torch.tensor([rows, width])
            if not self.symmetric:
                found["weight_zero_point"] = packed(zero.t(), self.bits).t()
            if self.ordered:
                found["weight_g_idx"] = index
        elif self.method == "awq":
            order = torch.tensor(AWQ_SHIFTS).argsort()
            columns = [each.t().unflatten(1, (-1, 8))[..., order].flatten(1) for each in (numbers, zero)]
            found = {"qweight": packed(columns[0], 4), "qzeros": packed(columns[1], 4), "scales": scale.t()}
        else:
            stored = (zero.t() - int(self.method == "gptq")) & most - 1  # 0 is stored as the largest number
            found = {"qweight": packed(numbers, self.bits).t(), "qzeros": packed(stored, self.bits)}
            found |= {"scales": scale.t(), "g_idx": index}
        return found, wide

    def _float8(self, weight: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, width = weight.shape
        block = (self.group, self.group) if self.group > 0 else (1, width) if self.group == 0 else (rows, width)
        values = torch.randn(rows, width, generator=draw).mul(100).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // block[0]), -(-width // block[1]), generator=draw) + 0.5
        scale = (scale * (0.01 * width**-0.5)).to(self.dtype)
        each = scale.float().repeat_interleave(block[0], 0)[:rows]
        name = "weight_scale_inv" if self.method == "fp8" and self.group > 0 else "weight_scale"
        stored = scale[0, 0] if self.group == -1 else scale
        return {"weight": values, name: stored}, values.float() * spread(each, block[1], width)


def pair(folder: Path, format: Format, *, seed: int = 3, **overrides: Any) -> tuple[Path, Path]:
    """Write a quantized checkpoint, and the same with dequantized weights."""
    plain, quantized = (random_checkpoint(folder / name, **overrides) for name in ("plain", "quantized"))
    draw, wide, narrow = torch.Generator().manual_seed(seed), load_file(plain / "model.safetensors"), {}
    for name, tensor in wide.items():
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer.rpartition(".")[2] not in PARTS:
            narrow[name] = tensor
            continue
        found, wide[name] = format.quantized(tensor, draw)
        narrow |= {f"{layer}.{each}": value.contiguous() for each, value in found.items()}
    save_file(wide, plain / "model.safetensors")
    write(quantized, narrow, format.section())
    return quantized, plain


def stacked_pair(folder: Path, *, seed: int = 3, **overrides: Any) -> tuple[Path, Path]:
    """Write experts of float8 in blocks as one tensor of all experts, and the same with dequantized weights."""
    quantized, plain = pair(folder, Format("fp8", group=32), seed=seed, **{**SPARSE, **overrides})
    for path in (quantized, plain):
        tensors, stacked = load_file(path / "model.safetensors"), dict[str, Tensor]()
        experts = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
        for mixture in experts:
            for suffix in ("weight", "weight_scale_inv"):
                named = {
                    part: [tensors.pop(f"{mixture}.experts.{expert}.{part}.{suffix}") for expert in range(4)]
                    for part in ("gate_proj", "up_proj", "down_proj")
                    if f"{mixture}.experts.0.{part}.{suffix}" in tensors
                }
                if not named:
                    continue
                end = suffix.removeprefix("weight")
                both = [torch.cat(each) for each in zip(named["gate_proj"], named["up_proj"], strict=True)]
                stacked[f"{mixture}.experts.gate_up_proj{end}"] = torch.stack(both)
                stacked[f"{mixture}.experts.down_proj{end}"] = torch.stack(named["down_proj"])
        save_file(tensors | stacked, path / "model.safetensors")
    return quantized, plain


def gpt_oss_pair(folder: Path, *, seed: int = 3, **overrides: Any) -> tuple[Path, Path]:
    """Write a gpt-oss whose experts are MXFP4, and the same with dequantized weights."""
    plain, quantized = (random_checkpoint(folder / name) for name in ("plain", "quantized"))
    config = {**json.loads((plain / "config.json").read_text()), **GPT_OSS, **overrides}
    drawn = RandomCheckpoint.of("gpt-oss", config)
    wide = {name.replace(".gate.", ".router."): each for name, each in drawn.read(drawn.tensors)}
    for each in (plain, quantized):
        write_json(each / "config.json", config)
    draw, narrow = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, tensor in wide.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            narrow[name] = tensor
            continue
        experts, width, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, rows, width // 32), generator=draw, dtype=torch.uint8)
        numbers = torch.tensor(E2M1)[torch.stack((blocks & 15, blocks >> 4), -1).long()].flatten(-2)
        values = (numbers * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2)
        wide[name] = values.transpose(1, 2).contiguous()
        narrow |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(wide, plain / "model.safetensors")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(quantized, narrow, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return quantized, plain


def modelslim(folder: Path, group: int, **described: Any) -> None:
    """Rewrite W4A8 of compressed-tensors as ModelSlim stores it, with down projections in W8A8_DYNAMIC."""
    tensors, types = load_file(folder / "model.safetensors"), dict[str, str]()
    for name in [each.removesuffix("_scale") for each in tensors if each.endswith(".weight_scale")]:
        layer, numbers, scale = name.removesuffix(".weight"), tensors[name], tensors[f"{name}_scale"].float()
        if layer.endswith("down_proj") and group == 0:
            types[name] = "W8A8_DYNAMIC"
            continue
        types[name] = "W4A8_DYNAMIC"
        tensors[name] = (numbers[::2] & 15 | numbers[1::2] << 4).contiguous()
        wide = numbers * spread(scale, group or numbers.shape[1], numbers.shape[1])
        columns = 16 if layer.endswith(("down_proj", "o_proj")) else 1
        tensors[f"{layer}.scale_bias"] = (8 * wide.sum(1, keepdim=True) / columns).expand(-1, columns).contiguous()
        if group:
            tensors[f"{name}_scale"], tensors[f"{name}_scale_second"] = scale[:, :1] * 2, scale / (scale[:, :1] * 2)
        tensors[f"{name}_offset"] = torch.zeros(len(scale), 1)
    save_file(tensors, folder / "model.safetensors")
    change_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    types = {name: types.get(name, "FLOAT") for name in tensors}
    given = {"model_quant_type": "W4A8_DYNAMIC", "version": "1.0.0", "group_size": group, **described}
    write_json(folder / "quant_model_description.json", {**given, **types})


def write(folder: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    save_file(dict(tensors), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": described})


def load(folder: Path, mesh: Mesh | None = None, experts: str = "split", **config: Any) -> CausalLM:
    config |= {"backend": "cpu", "options": {"pack_weights": False}}
    if experts != "split":
        config["parallel"] = {"tensor": 2, "experts": experts}
    with hal.open(config, mesh=mesh or Mesh()) as backend:
        return hal.load_model(folder, backend)


def logits(folder: Path, compiler: str = "eager", **config: Any) -> Tensor:
    compilation = {"compiler": compiler, "capture_sizes": [1]}
    given = {"backend": "cpu", "options": {"pack_weights": False}, "compilation": compilation, **config}
    with hal.open(given) as backend, hal.Runner(hal.load_model(folder, backend), backend) as runner:
        found = [runner.step(runner.batch([TOKENS], [[1]]), hal.step.ALL).logits.clone()]
        found.append(runner.step(runner.batch([[5]], [[1]], cached=[len(TOKENS)])).logits.clone())
    return torch.cat(found)


def ranks(folder: Path, experts: str = "split", count: int = 2, **config: Any) -> list[CausalLM]:
    """Load the parts of some ranks in this process. They compute nothing together."""
    groups = [Group("ranks", rank, count, object()) for rank in range(count)]
    meshes = [Mesh(tensor=each, **({} if experts == "split" else {"expert": each})) for each in groups]
    return [load(folder, mesh, experts, **config) for mesh in meshes]
