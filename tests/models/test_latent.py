"""Tests of models with latent attention, beside the comparison with transformers in test_assembled.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers import published_configs
from helpers.checkpoints import write_json
from helpers.low_bits import Format
from helpers.reference import open_runner
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.nn import AbsorbedLinear, MergedLinear
from hal.step import ALL

NAME = "DeepSeek-V3"


def logits(runner: hal.Runner) -> Tensor:
    return runner.step(runner.batch([[5, 6, 7, 8]], [[1]]), ALL).logits


def test_float8_in_blocks_that_latents_do_not_fill(tmp_path: Path) -> None:
    """The projection to keys and values is widened; the blocks have 16 rows, and the latents 24 and 40."""
    plain, draw = published_configs.write(tmp_path / "plain", NAME), torch.Generator().manual_seed(3)
    wide, narrow = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in wide.items():
        layer, _, _ = name.rpartition(".")
        if not layer.endswith(("_proj", "_mqa")):
            narrow[name] = tensor
            continue
        found, wide[name] = Format("fp8", group=16).quantized(tensor, draw)
        narrow |= {f"{layer}.{each}": value.contiguous() for each, value in found.items()}
    save_file(wide, plain / "model.safetensors")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((plain / "config.json").read_text())
    write_json(quantized / "config.json", {**config, "quantization_config": Format("fp8", group=16).section()})
    save_file(narrow, quantized / "model.safetensors")

    runner = open_runner(quantized)
    forms = {type(each): each.form.numbers for each in runner.model.modules() if isinstance(each, hal.nn.Projection)}
    assert (forms[AbsorbedLinear], forms[MergedLinear]) == ("float", "float8")
    torch.testing.assert_close(logits(runner), logits(open_runner(plain)), rtol=1e-4, atol=1e-4)


def test_a_token_takes_one_latent_and_one_rotary_row(tmp_path: Path) -> None:
    config = published_configs.CONFIGS[NAME]
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    runner = open_runner(published_configs.write(tmp_path / "model", NAME))
    assert runner.spec.token_bytes == config["num_hidden_layers"] * row * torch.float32.itemsize


def test_kimi_k2_has_the_same_architecture(tmp_path: Path) -> None:
    changes = {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
    given = hal.RandomCheckpoint.of("kimi", {**published_configs.CONFIGS[NAME], **changes})
    backend = hal.open({"backend": "cpu", "dtype": "float32"})
    assert logits(hal.Runner(hal.load_model(given, backend), backend)).isfinite().all()
