"""Tests of DeepSeek-V4 beside the comparison with transformers in test_hybrids.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.deepseek_v4_config import DeepseekV4Config
from helpers.comparison import TOLERANCE, difference, rewritten, their_logits
from helpers.random_hybrids import build, draw_config
from helpers.reference import open_runner
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.errors import CheckpointError, ConfigError
from hal.step import ALL

FAMILY = "DeepseekV4"
TOKENS = list(range(40))
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "max_position_embeddings": 1048576,
    "compress_ratios": [0, 128, 4, 128, 4, 0],  # the last one of a layer that predicts further tokens
    "num_hash_layers": 3,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
}
"""Keys of a published config.json, whose other ones have their defaults."""


def logits(runner: hal.Runner) -> Tensor:
    slots = runner.slots.take(1)
    found = runner.step(runner.batch([TOKENS], [[1, 2, 3]], slots=slots), ALL).logits.clone()
    runner.slots.give_back(slots or ())
    return found


def test_the_published_spelling_of_the_config() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    found = DeepseekV4Config.from_config(PUBLISHED)
    theirs = transformers.DeepseekV4Config(**{key: value for key, value in PUBLISHED.items() if key != "architectures"})
    assert found == DeepseekV4Config.from_config(theirs.to_dict())
    assert found.rope.attention_scaling == 1.0
    assert found.main_rope.rope_theta == 10000
    assert list(found.layer_types) == theirs.layer_types
    assert list(found.mlp_layer_types) == theirs.mlp_layer_types
    assert [found.group(each) for each in found.layer_types] == [0, 128, 4, 128, 4]
    plain = {key: value for key, value in PUBLISHED.items() if key != "compress_ratios"}
    plain |= {"compress_rate_csa": 8, "compress_rate_hca": 64}
    without = transformers.DeepseekV4Config(**{key: value for key, value in plain.items() if key != "architectures"})
    other = DeepseekV4Config.from_config(plain)
    assert (list(other.layer_types), other.compress_rates) == (without.layer_types, without.compress_rates)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("expert_dtype", "fp4", "expert_dtype"),
        ("scoring_func", "softmax", "scoring_func"),
        ("o_groups", 7, "o_groups, 7, does not divide num_attention_heads"),
        ("index_head_dim", 32, "index_head_dim, 32, is less than qk_rope_head_dim, 64"),
        ("compress_ratios", [0, 64, 4, 128, 4], "layer_types"),
        ("compress_rates", {"compressed_sparse_attention": 4}, "for heavily_compressed_attention"),
    ],
)
def test_what_is_refused(key: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DeepseekV4Config.from_config({**PUBLISHED, key: value})


@pytest.mark.parametrize("beside", [True, False])
def test_experts_in_fp4_are_refused(beside: bool, tmp_path: Path) -> None:
    """The published config.json says it beside the table, that of version 4.1 in it."""
    build(tmp_path / "model", FAMILY, 0)
    table, experts = {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"expert_dtype": "fp4"}
    changes = {"quantization_config": table, **experts} if beside else {"quantization_config": {**table, **experts}}
    path = rewritten(tmp_path / "model", tmp_path, lambda config: config.update(changes))
    with pytest.raises(ConfigError, match="expert_dtype"):
        open_runner(path)


@pytest.mark.parametrize("spelling", ["published", "module names"])
def test_names_of_tensors(spelling: str, tmp_path: Path) -> None:
    """The published names have no prefix, and transformers' own have one tensor for all experts."""
    folder = tmp_path / "model"
    model = build(folder, FAMILY, 0)
    if spelling == "published":
        tensors = load_file(folder / "model.safetensors")
        names = {name: name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.") for name in tensors}
        assert "layers.0.attn.kv_norm.weight" in names.values()
        tensors = {names[name]: tensor for name, tensor in tensors.items()} | {"mtp.0.e_proj.weight": torch.ones(2)}
        save_file(tensors, folder / "model.safetensors")
    else:
        model.save_pretrained(folder, save_original_format=False)
        assert any(".compressor.indexer.scorer." in name for name in load_file(folder / "model.safetensors"))
    assert difference([logits(open_runner(folder, block_size=16))], [their_logits(model, TOKENS)]) <= TOLERANCE


def test_a_table_that_names_no_expert_is_refused(tmp_path: Path) -> None:
    build(tmp_path, FAMILY, 0, mlp_layer_types=["hash_moe"] * draw_config(FAMILY, 0).num_hidden_layers)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.ffn.gate.tid2eid"][3, 0] = 1000
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"tid2eid names an expert that is none of the"):
        open_runner(tmp_path, block_size=16)


def test_blocks_are_whole_groups(tmp_path: Path) -> None:
    build(tmp_path, FAMILY, 0)
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"num_tokens": 500}})
    spec = hal.Runner(hal.load_model(tmp_path, backend), backend).spec
    groups = {state.group for _, _, state in spec.states()}
    assert len(groups) > 1
    assert spec.block_size == math.lcm(backend.block_size, *groups)
    with pytest.raises(ConfigError, match=r"for groups of \d+ tokens, and a block has 7"):
        open_runner(tmp_path, block_size=7)
