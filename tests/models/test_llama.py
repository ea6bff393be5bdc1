"""Tests of Llama and Mistral: sizes, windows, tensors of old checkpoints; their logits are in test_assembled.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.llama import LlamaForCausalLM, MistralForCausalLM
from helpers.comparison import transformers
from safetensors.torch import load_file, save_file

import hal
from hal.errors import CheckpointError, ConfigError

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def with_extra(path: Path, name: str) -> Path:
    """Write a copy of the one-file checkpoint at ``path`` with one more tensor."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=56, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    save_file({**load_file(path / "model.safetensors"), name: torch.ones(6)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_frequencies_in_old_checkpoints_are_ignored(architecture: str, tmp_path: Path, cpu: hal.Backend) -> None:
    path = with_extra(tmp_path, INV_FREQ)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    assert type(hal.load_model(path, cpu)).__name__ == architecture


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.rotary_emb.cos_cached", f"{INV_FREQ}.weight", "model.layers.0.self_attn.inv_freq"],
)
def test_other_tensors_that_are_too_many_are_not(name: str, tmp_path: Path, cpu: hal.Backend) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is not in the model"):
        hal.load_model(with_extra(tmp_path, name), cpu)


def test_a_family_that_ignores_none_takes_no_frequencies(trained: Path, tmp_path: Path, cpu: hal.Backend) -> None:
    folder = shutil.copytree(trained, tmp_path / "qwen3")
    save_file({**load_file(folder / "model.safetensors"), INV_FREQ: torch.ones(6)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{INV_FREQ} is not in the model"):
        hal.load_model(folder, cpu)


SMALL: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def windows(**changes: Any) -> list[int | None]:
    with torch.device("meta"):
        model = MistralForCausalLM.from_config(SMALL | changes)
    return [layer.self_attn.attention.options.window for layer in model.model.layers]


def test_windows_of_mistral() -> None:
    assert windows() == [4096, 4096], "the default of transformers"
    assert windows(sliding_window=None) == [None, None]
    assert windows(sliding_window=6) == [6, 6]
    with pytest.raises(ConfigError, match="sliding_window is 0"):
        windows(sliding_window=0)


def test_sizes_that_follow_from_others() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM.from_config(SMALL)
    assert [layer["key"].shape for layer in model.states] == [(2, 4)] * SMALL["num_hidden_layers"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads' must be >= 1"),
        ({"num_attention_heads": 8}, "head_dim is 1; the rotary embedding needs an even number"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads, 4, is not a multiple"),
        ({"mlp_bias": "yes"}, "expected bool, found str 'yes'"),
        ({"hidden_act": "mish"}, "unknown value 'mish'.*silu"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaForCausalLM.from_config(SMALL | changes)
