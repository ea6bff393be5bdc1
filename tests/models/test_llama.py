"""Tests for Llama and Mistral against Hugging Face transformers, on random checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.llama import LlamaForCausalLM, MistralForCausalLM
from helpers.comparison import (
    ROPES,
    TOLERANCE,
    Case,
    build,
    draw_rope,
    spell_as_before_version_5,
    transformers,
)
from helpers.thorough import DRAW, EXHAUSTIVE, thorough
from safetensors.torch import load_file, save_file

import hal
from hal.errors import CheckpointError, ConfigError

SEEDS = range(8, 28)  # test_the_configurations_cover_what_they_should checks these seeds.
# Compiling takes seconds each. These seeds cover all that changes a graph; the same test checks that.
COMPILED = (*SEEDS[:8], 27)
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def draw_config(seed: int) -> Any:
    """Draw a Llama or Mistral configuration; every type of rope parameters occurs in both."""
    draw = random.Random(seed)
    family, kv_heads = ("llama", "mistral")[seed // len(ROPES) % 2], draw.choice((1, 2))
    sizes = {
        "vocab_size": draw.choice((97, 256, 1000)),
        "hidden_size": draw.choice((48, 80, 96, 160)),
        "intermediate_size": draw.choice((56, 128, 200)),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": kv_heads * draw.choice((1, 2, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((None, 16, 32, 64, 128)),
        "max_position_embeddings": 128,
    }
    rest = {
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "rope_parameters": draw_rope(draw, ROPES[seed % len(ROPES)]),
        "tie_word_embeddings": draw.random() < 0.5,
        "attn_implementation": "eager",
    }
    if family == "mistral":
        return transformers.MistralConfig(**sizes, **rest, sliding_window=draw.choice((None, 5, 13, 20)))
    biases = {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
    return transformers.LlamaConfig(**sizes, **rest, **biases)


def older(config: dict[str, Any], draw: random.Random) -> None:
    """Rewrite a config.json as the first checkpoints have it, without values that follow from other sizes."""
    spell_as_before_version_5(config, draw)
    if config["head_dim"] == config["hidden_size"] // config["num_attention_heads"]:
        del config["head_dim"]
    if config["num_key_value_heads"] == config["num_attention_heads"]:
        config["num_key_value_heads"] = None


@pytest.fixture(scope="module", params=SEEDS, ids="seed={}".format)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return build(draw_config(request.param), request.param, tmp_path_factory.mktemp("llama"), older)


@thorough(DRAW, r"\[seed=(1[3-9]|2\d)(-\w+)?\]|\[seed=([5-9]|1[0-2])(-\w+)?\]")
@thorough(EXHAUSTIVE, r"\[seed=([68]|1[02468]|2[02468])-eager|\[seed=([579]|1[13579]|2[13579])-graph")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_logits(case: Case, compiler: str) -> None:
    assert case.difference(compiler) <= TOLERANCE


@thorough(EXHAUSTIVE, r"\[seed=(9|10|12)")
@thorough(DRAW, r"\[seed=(1[3-9]|2\d)(-\w+)?\]|\[seed=([5-9]|1[0-2])(-\w+)?\]")
@thorough(EXHAUSTIVE, r"\[seed=(8|1[135])")
@pytest.mark.parametrize("case", COMPILED, ids="seed={}".format, indirect=True)
def test_logits_through_inductor(case: Case) -> None:
    assert case.difference("inductor") <= TOLERANCE


@thorough(DRAW, r"\[seed=(1[3-9]|2\d)(-\w+)?\]|\[seed=([5-9]|1[0-2])(-\w+)?\]")
def test_prefill_after_a_cached_prefix(case: Case) -> None:
    assert case.difference(cuts=case.cuts) <= TOLERANCE


def test_the_configurations_cover_what_they_should(tmp_path: Path) -> None:
    for seeds in (SEEDS, COMPILED):
        configs = [draw_config(seed) for seed in seeds]
        llamas = [config for config in configs if config.model_type == "llama"]
        mistrals = [config for config in configs if config.model_type == "mistral"]
        for family in (llamas, mistrals):
            assert {config.rope_parameters["rope_type"] for config in family} == set(ROPES)
            assert {config.tie_word_embeddings for config in family} == {False, True}
            derived = {config.head_dim * config.num_attention_heads == config.hidden_size for config in family}
            assert derived == {False, True}
        assert {config.num_attention_heads // config.num_key_value_heads for config in configs} == {1, 2, 4}
        assert {(config.attention_bias, config.mlp_bias) for config in llamas} == {
            (attention, mlp) for attention in (False, True) for mlp in (False, True)
        }
        assert {config.sliding_window is None for config in mistrals} == {False, True}
    configs = [draw_config(seed) for seed in SEEDS]
    optional = {"attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"}
    assert optional <= {key for config in configs for key in config.rope_parameters}

    files = set()
    for seed in SEEDS:
        path = build(draw_config(seed), seed, tmp_path / str(seed), older).path
        rope_scaling = json.loads((path / "config.json").read_text()).get("rope_scaling", "new spelling")
        spelling = rope_scaling if isinstance(rope_scaling, str) else next(iter(rope_scaling or {}), None)
        files.add((spelling, (path / "model.safetensors.index.json").exists()))
    assert {spelling for spelling, _ in files} == {"new spelling", None, "type", "rope_type"}
    assert {sharded for _, sharded in files} == {False, True}


LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 5.0,
    "beta_slow": 1.0,
    "truncate": True,
}


@pytest.mark.parametrize(
    ("rope", "changes"),
    [
        (LINEAR, {"factor": 4.1}),
        (LLAMA3, {"factor": 8.2}),
        (LLAMA3, {"low_freq_factor": 1.1}),
        (LLAMA3, {"high_freq_factor": 4.1}),
        (LLAMA3, {"original_max_position_embeddings": 65}),
        (YARN, {"factor": 4.1}),
        (YARN, {"original_max_position_embeddings": 80}),
        (YARN, {"beta_fast": 8.0}),
        (YARN, {"beta_slow": 0.5}),
        (YARN, {"truncate": False}),
        (YARN, {"attention_factor": 1.13}),
        (YARN, {"mscale": 1.0, "mscale_all_dim": 0.5}),
        (LLAMA3, {"sliding_window": 8}),
    ],
)
def test_a_wrong_config_would_be_noticed(rope: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """The comparison detects a wrong value of each of these keys."""
    config = transformers.MistralConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        sliding_window=9,
        rope_parameters=dict(rope),
        attn_implementation="eager",
    )
    case = build(config, 0, tmp_path / "right")

    def change(wrong: dict[str, Any]) -> None:
        for key, value in changes.items():
            (wrong if key == "sliding_window" else wrong["rope_parameters"])[key] = value

    assert case.difference() <= TOLERANCE
    assert case.difference(path=case.rewritten(tmp_path, change)) > TOLERANCE


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
