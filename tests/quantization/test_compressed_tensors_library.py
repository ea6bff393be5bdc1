"""Tests with compressed-tensors' own library: hal reads what it packs, and it reads what ``hal quantize`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import random_checkpoint, write_json
from helpers.low_bits import DENSE
from helpers.quantized import PARTS, all_layers, error
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.quantize.quantize_checkpoint import quantize_checkpoint

pytest.importorskip("compressed_tensors", reason="compressed-tensors, of the extra test, is not installed")
from compressed_tensors.compressors import (
    MXFP4PackedCompressor,
    NaiveQuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

INTEGERS = {"type": "int", "strategy": "group", "group_size": 32}
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {**INTEGERS, "num_bits": 4},
    "int4-zero-points": {**INTEGERS, "num_bits": 4, "symmetric": False},
    "int8-zero-points": {**INTEGERS, "num_bits": 8, "symmetric": False},
    "int4-rows": {"num_bits": 4, "type": "int", "strategy": "channel"},
    "float8-rows": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
}


def compressor(weights: dict[str, Any]) -> Any:
    if weights["type"] == "float" and weights["num_bits"] == 4:
        return NVFP4PackedCompressor if weights["group_size"] == 16 else MXFP4PackedCompressor
    return NaiveQuantizationCompressor if weights["type"] == "float" else PackedQuantizationCompressor


def scheme_of(weights: dict[str, Any]) -> Any:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def state(weight: Tensor, weights: dict[str, Any]) -> dict[str, Tensor]:
    """Return a weight with scales and zero points, as a calibrated module of the library has them."""
    size = weights.get("group_size") or weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    largest = groups.abs().amax(-1)
    if weights["type"] == "float" and size == 32:
        return {"weight": weight, "weight_scale": 2.0 ** (largest / 6).log2().ceil()}
    if weights["type"] == "float" and size == 16:
        second = 448 * 6 / largest.amax().reshape(1)
        scale = (largest / 6 * second).to(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": second}
    if weights["type"] == "float":
        return {"weight": weight, "weight_scale": largest / 448}
    most = 1 << weights["num_bits"] - 1
    if weights.get("symmetric", True):
        return {"weight": weight, "weight_scale": groups.abs().amax(-1) / (most - 0.5)}
    scale = (high - low) / (2 * most - 1)
    zero = (-most - (low / scale).round()).clamp(-most, most - 1).to(torch.int8)
    return {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}


@pytest.mark.parametrize("kind", FORMATS)
def test_hal_reads_what_the_library_writes(kind: str, tmp_path: Path) -> None:
    weights = FORMATS[kind]
    folder, library, scheme = random_checkpoint(tmp_path / "it", **DENSE), compressor(weights), scheme_of(weights)
    written, exact = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, suffix = name.rpartition(".")
        if suffix != "weight" or layer.rpartition(".")[2] not in PARTS:
            written[name] = tensor
            continue
        packed = library.compress(state(tensor, weights), scheme)
        written |= {f"{layer}.{each}": value.contiguous() for each, value in packed.items()}
        exact[layer] = library.decompress(packed, scheme)["weight"]
    save_file(written, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    names = {"float8": "float-quantized", "nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
    format = names.get(kind.partition("-")[0], "pack-quantized")
    group = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json"), "input_activations": None}
    section = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    write_json(folder / "config.json", {**config, "quantization_config": {**section, "ignore": ["lm_head"]}})
    options = {"native": False, "pack_weights": False}  # weights in their plain layout
    with hal.open({"backend": "cpu", "quantized_weights": "dequantized", "options": options}) as backend:
        model = hal.load_model(folder, backend)
    found = all_layers(model)
    assert len(found) == 8
    for path, module in found.items():
        parent = path.rpartition(".")[0]
        wanted = torch.cat([exact[f"{parent}.{part}"] for part in module.parts] or [exact[path]])
        assert not module.quantized
        whole = wanted.dtype is torch.float32  # the library widens float4 to bfloat16
        torch.testing.assert_close(module.weight, wanted.float(), rtol=1e-5 if whole else 1e-2, atol=1e-6)


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8_dynamic", "w8a16_group", "fp8", "fp8_dynamic"])
def test_the_library_reads_what_hal_writes(scheme: str, tmp_path: Path) -> None:
    plain = random_checkpoint(tmp_path / "plain", **DENSE)
    groups = {} if scheme.startswith("fp8") else {"group_size": 32}
    made = quantize_checkpoint(plain, tmp_path / "out", scheme, **groups)  # type: ignore[arg-type]
    section = json.loads((made.path / "config.json").read_text())["quantization_config"]
    weights = section["config_groups"]["group_0"]["weights"]
    whole = section["format"] == "int-quantized"
    library = NaiveQuantizationCompressor if whole else compressor(weights)
    known = QuantizationScheme(**section["config_groups"]["group_0"])
    narrow, wide = (load_file(each / "model.safetensors") for each in (made.path, plain))
    for name, found in made.errors.items():
        parts = {key.rpartition(".")[2]: value for key, value in narrow.items() if key.startswith(f"{name}.weight")}
        exact = library.decompress(parts, known)["weight"].float()
        assert error(exact, wide[f"{name}.weight"]) == pytest.approx(found, abs=1e-4)
        assert found < {"w4a16": 0.1, "w4a8_dynamic": 0.1, "w8a16_group": 0.01}.get(scheme, 0.04)
