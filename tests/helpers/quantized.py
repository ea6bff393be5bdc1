"""Checkpoints with int8 layers in both formats, written without hal, and their expected results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.quantized_layers import linear_layers
from hal.nn import CausalLM, Linear, Projection
from hal.ops.forms import dequantize
from hal.parallel import Mesh
from helpers.checkpoints import random_checkpoint, write_json

Format = Literal["compressed-tensors", "modelslim"]
Scheme = Literal["w8a16", "w8a8", "w8a8_dynamic"]
FORMATS: tuple[Format, ...] = ("compressed-tensors", "modelslim")
SCHEMES: tuple[Scheme, ...] = ("w8a16", "w8a8", "w8a8_dynamic")
DESCRIPTION = "quant_model_description.json"
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOWN = "model.layers.1.mlp.down_proj"
QUERY = "model.layers.0.self_attn.q_proj"
TOKENS = [1, 7, 30, 4, 200, 19, 19, 3]
TEXT = "the cat sat on the mat and the rat sat on the hat, é 日本 🙂\n" * 8

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
ACTIVATIONS: dict[Scheme, dict[str, Any] | None] = {"w8a16": None, "w8a8": STATIC, "w8a8_dynamic": DYNAMIC}


@attrs.frozen
class Layer:
    """A quantized layer.

    Attributes:
        weight: int8.
        scale: the scale of each row.
        input_scale: the scale of the activations, if static.
        offset: the offset of the activations, if static.
        bias: the bias, or None.
    """

    weight: Tensor
    scale: Tensor
    input_scale: float
    offset: int
    bias: Tensor | None

    def dequantized(self) -> Tensor:
        return self.weight.double() * self.scale.double().unsqueeze(-1)


def quantized(tensors: Mapping[str, Tensor], name: str, input_scale: float, offset: int) -> Layer:
    weight = tensors[f"{name}.weight"]
    scale = weight.abs().amax(-1) / 127
    return Layer(
        (weight / scale.unsqueeze(-1)).round().to(torch.int8), scale, input_scale, offset, tensors.get(f"{name}.bias")
    )


def entries(layer: Layer, name: str, format: Format, scheme: Scheme, bits: bool) -> dict[str, Tensor]:
    """Return a layer's tensors, as the documentation of each format specifies them."""
    found = {"weight": layer.weight, "weight_scale": layer.scale.unsqueeze(-1)}
    if format == "compressed-tensors":
        if scheme == "w8a8":
            found["input_scale"] = torch.tensor([layer.input_scale])
            found["input_zero_point"] = torch.tensor([layer.offset], dtype=torch.int8)
        found |= {} if layer.bias is None else {"bias": layer.bias}
    else:
        found["weight_offset"] = torch.zeros(len(layer.scale), 1)
        if scheme == "w8a8":
            deq_scale = layer.input_scale * layer.scale
            bias = 0 if layer.bias is None else layer.bias / deq_scale
            found["input_scale"] = torch.tensor([layer.input_scale])
            found["input_offset"] = torch.tensor([layer.offset], dtype=torch.float32)
            found["quant_bias"] = (bias - layer.weight.int().sum(-1) * layer.offset).round().to(torch.int32)
            found["deq_scale"] = deq_scale.view(torch.int32).long() if bits else deq_scale
        elif layer.bias is not None:
            found["bias"] = layer.bias
    return {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}


def section(scheme: Scheme, **changes: Any) -> dict[str, Any]:
    """Return a quantization_config."""
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS[scheme]}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **changes,
    }


def describe(folder: Path, format: Format, scheme: Scheme, names: Mapping[str, bool]) -> None:
    if format == "compressed-tensors":
        change_json(folder / "config.json", lambda config: config.update(quantization_config=section(scheme)))
        return
    kind = scheme.upper()
    types = {name: kind if quantized else "FLOAT" for name, quantized in names.items()}
    write_json(folder / DESCRIPTION, {"model_quant_type": kind, "version": "1.0.0", "group_size": 0, **types})


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    write_json(file, value)


def config(**changes: Any) -> Callable[[Path], object]:
    """Return a function that changes keys of a checkpoint's quantization_config."""
    return lambda folder: change_json(
        folder / "config.json", lambda value: value["quantization_config"].update(changes)
    )


def group(name: str, **changes: Any) -> Callable[[Path], object]:
    """Return a function that changes keys of a part of the only group of a quantization_config."""

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"][name].update(changes)

    return lambda folder: change_json(folder / "config.json", change)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@attrs.frozen
class Pair:
    """A quantized checkpoint, the same with dequantized weights, and its layers by name."""

    folder: Path
    float_folder: Path
    layers: dict[str, Layer]


def make_pair(
    tmp_path: Path,
    format: Format,
    scheme: Scheme,
    *,
    keep: tuple[str, ...] = (),
    bits: bool = False,
    offset: int = -7,
    **overrides: Any,
) -> Pair:
    """Write both checkpoints. ``keep`` names layers that are not quantized."""
    folder = random_checkpoint(tmp_path / "quantized", **overrides)
    float_folder = shutil.copytree(folder, tmp_path / "float")
    tensors = load_file(folder / "model.safetensors")
    layers, written, plain, names = {}, {}, dict(tensors), {}
    for full in tensors:
        name, _, suffix = full.rpartition(".")
        if name.rpartition(".")[2] not in PARTS or name in keep:
            written[full], names[full] = tensors[full], False
        elif suffix == "weight":
            layers[name] = layer = quantized(tensors, name, 0.03, offset)
            plain[full] = layer.dequantized().float()
            found = entries(layer, name, format, scheme, bits)
            written |= found
            names |= dict.fromkeys(found, True)
    save_file(written, folder / "model.safetensors")
    save_file(plain, float_folder / "model.safetensors")
    describe(folder, format, scheme, names)
    return Pair(folder, float_folder, layers)


def load(folder: Path, mesh: Mesh | None = None, **config: Any) -> hal.nn.CausalLM:
    return hal.load_model(folder, hal.open({"backend": "cpu", **config}, mesh=mesh or Mesh()))


def logits(model: hal.nn.CausalLM, compiler: str = "eager") -> Tensor:
    """Return the logits of the prompt's last token, and of each of a few tokens decoded after it."""
    backend = hal.active_backend()
    backend.configure(attrs.evolve(backend.config, compilation=hal.CompilationConfig(compiler, capture_sizes=(1,))))
    runner = hal.Runner(model, backend)
    blocks = runner.blocks.take(1)
    assert blocks is not None
    found = [runner.step(runner.batch([TOKENS], [blocks])).logits.clone()]
    for index in range(3):
        batch = runner.batch([[TOKENS[index]]], [blocks], cached=[len(TOKENS) + index])
        found.append(runner.step(batch).logits.clone())
    return torch.cat(found)


def fake_quantize(layer: Layer, scheme: Scheme, module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    """Quantize to int8 and dequantize, in float64, as far as the scheme quantizes activations."""
    if scheme == "w8a16":
        return arguments
    x = arguments[0].double()
    if scheme == "w8a8":
        numbers = (x / layer.input_scale + layer.offset).round().clamp(-128, 127)
        return (((numbers - layer.offset) * layer.input_scale).to(arguments[0].dtype),)
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (((x / scale).round() * scale).to(arguments[0].dtype),)


def names_of(path: str, module: Linear) -> list[str]:
    parent = path.rpartition(".")[0]
    return [f"{parent}.{part}" for part in getattr(module, "parts", ())] or [path]


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of the whole tensor."""
    return ((found - wanted).norm() / wanted.norm()).item()


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in (lambda each: each.read(each.tensors))(Checkpoint.open(folder))}


def kept_layers(model: CausalLM) -> dict[str, Any]:
    """Return the layers whose weights are kept in another form than floating-point numbers, by path."""
    return {path: each for path, each in model.named_modules() if isinstance(each, Projection) and each.quantized}


def all_layers(model: CausalLM) -> dict[str, Any]:
    """Return the layers that a checkpoint quantizes by default, whichever form they have, by path."""
    return dict(linear_layers(model))


def wide(layer: Any) -> Tensor:
    """Return the weight that a layer's numbers and scales mean, in float32."""
    return dequantize(layer.form, layer.weight, layer.weight_scale, layer.weight_zero_point)


def check_ranks(whole: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], *, gathered: bool = False) -> None:
    """Check that the outputs of the ranks' layers, by path, are together those of the whole layers.

    Args:
        whole: the layers of one rank.
        parts: those of several ranks, which compute nothing together then.
        gathered: whether ranks that divide inputs gather all of them.
    """
    for path, layer in whole.items():
        x = torch.randn(6, layer.in_features, generator=torch.Generator().manual_seed(1))
        counts = [] if layer.num_experts is None else [torch.tensor([2, 0, 1, 3])]
        summed = layer.shard == "in_features"
        given = x.chunk(len(parts), -1) if summed and not gathered else [x] * len(parts)
        mine = []
        for each, own in zip(parts, given, strict=True):
            each[path].group = None
            mine.append(each[path](own, *counts))
        if summed:
            found = torch.stack(mine).sum(0)
        else:
            by_part = zip(*(each.split(list(parts[0][path].sizes), -1) for each in mine), strict=True)
            found = torch.cat([rank for part in by_part for rank in part], -1)
        assert error(found, layer(x, *counts)) < 1e-5, path
