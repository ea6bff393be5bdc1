"""Tests of Qwen3.8-Flash-Next beside the comparison with transformers in test_hybrids.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.models.qwen4_exp_config import Qwen4ExpConfig
from hal.models.qwen4_exp_ngrams import multipliers, table_sizes
from helpers import published_configs
from helpers.comparison import TOLERANCE, difference, randomize, their_logits
from helpers.random_hybrids import build, draw_config
from helpers.reference import open_runner
from safetensors.torch import load_file, save_file
from torch import Tensor

import hal
from hal.errors import CheckpointError, ConfigError
from hal.step import ALL

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

NAME, FAMILY = "Qwen3.8-Flash-Next", "Qwen4ExpText"
TEXT = published_configs.CONFIGS[NAME]["text_config"]
TOKENS = [*range(40), TEXT["eos_token_id"], *range(9)]


def logits(runner: hal.Runner) -> Tensor:
    return runner.step(runner.batch([TOKENS], [[1, 2, 3, 4]], slots=[1]), ALL).logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab_size": 248320, "ngram_vocab_size_base": 20_000_000, "heads_per_ngram": 8, "ple_embed_dim": 64},
        {"ngram_size": 5, "seed": 7, "ngram_vocab_size_base": 1, "make_ngram_vocab_size_divisible_by": 3},
    ],
)
def test_hashes_are_those_of_transformers(changes: dict[str, Any]) -> None:
    """They follow from the configuration, so that the checkpoint's are not read."""
    given = {**TEXT, **changes}
    ours, theirs = Qwen4ExpConfig.from_config(given), transformers.Qwen4ExpTextConfig(**given)
    with torch.device("meta"):
        model = transformers.Qwen4ExpForCausalLM(theirs)
    embeddings = [each.ple.ple_embedding for each in model.model.layers if each.ple is not None]
    assert len(embeddings) == len(TEXT["ple_layer_ids"])
    for place, theirs in enumerate(embeddings):
        assert table_sizes(ours, place) == theirs.head_vocab_sizes
        made = transformers.models.qwen4_exp.modeling_qwen4_exp._build_layer_multipliers(
            theirs.unigram_vocab_size, theirs.ngram_size, place, theirs.seed
        )
        assert multipliers(ours, place) == made.tolist()


def test_the_types_of_layers_have_two_spellings() -> None:
    types = ["indexed_attention" if each == "full_attention" else each for each in TEXT["layer_types"]]
    assert types != TEXT["layer_types"]
    assert Qwen4ExpConfig.from_config({**TEXT, "layer_types": types}) == Qwen4ExpConfig.from_config(TEXT)


def test_a_token_takes_a_key_a_value_and_a_part_of_an_index_key(tmp_path: Path) -> None:
    runner = open_runner(published_configs.write(tmp_path / "model", NAME))
    keys = 2 * TEXT["num_key_value_heads"] * TEXT["head_dim"]
    index = TEXT["indexer_head_dim"] // TEXT["indexer_compress_ratio"]  # in one layer of three
    assert runner.spec.token_bytes == (keys + index) * torch.float32.itemsize


def test_the_text_model_of_a_checkpoint_that_reads_images(tmp_path: Path) -> None:
    """Its names have a prefix, and the tables of n-grams have one tensor for each part."""
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "ple_layer_ids": [1]}
    text = draw_config(FAMILY, 3, **layers, tie_word_embeddings=False, split_ngram_parts=4)
    tower = published_configs.CONFIGS[NAME]["vision_config"] | {"out_hidden_size": text.hidden_size}
    config = transformers.Qwen4ExpConfig(text_config=text.to_dict(), vision_config=tower)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    randomize(model, 3)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert sum("ngram_embedding.shard_" in name for name in names) == text.split_ngram_parts
    assert any(name.startswith("model.visual.") for name in names)
    assert difference([logits(open_runner(tmp_path))], [their_logits(model, TOKENS)]) <= TOLERANCE


@pytest.mark.parametrize(
    "name",
    ["layers.1.self_attn.indexer.index_qk_proj.weight", "layers.0.ple.ple_embedding.ngram_embedding.shard_3.weight"],
)
def test_a_checkpoint_without_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", NAME)
    tensors = load_file(path / "model.safetensors")
    found = [each for each in tensors if each.endswith(name)]
    assert len(found) == 1
    save_file({each: value for each, value in tensors.items() if each not in found}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        open_runner(path)


def test_tables_of_another_size_are_refused(tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", NAME)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["ngram_vocab_size_base"] = 500
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"shard_0\.weight"):
        open_runner(path)


def test_blocks_that_groups_do_not_fill_are_refused(tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", NAME)
    with pytest.raises(ConfigError, match=r"its index for groups of 4 tokens, and a block has 6\n.*a multiple of 4"):
        open_runner(path, block_size=6)


def test_a_cache_in_8_bits_is_refused(tmp_path: Path) -> None:
    path = published_configs.write(tmp_path / "model", NAME)
    backend = hal.open({"backend": "cpu", "dtype": "float32", "cache": {"dtype": "int8"}})
    with pytest.raises(ConfigError, match="attention to selected positions reads it in the model's dtype"):
        hal.load_model(path, backend)


def test_a_budget_for_all_tokens_is_full_attention(tmp_path: Path) -> None:
    """With a smaller one, the tokens that are left out matter."""
    found = []
    for budget in (len(TOKENS) // 4 * 4, 10_000, 4):
        build(tmp_path / str(budget), FAMILY, 5, indexer_compress_ratio=4, indexer_budget=budget)
        found.append(logits(open_runner(tmp_path / str(budget))))
    assert torch.equal(found[0], found[1])
    assert difference([found[2]], [found[0]]) > 100 * TOLERANCE
