"""Tests of hal.LLM with models that are not dense decoders in floating point: several texts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.comparison import randomize
from helpers.low_bits import DENSE, Format, pair
from helpers.tiny_transformers import model_of

import hal

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

PROMPTS = [[5, 31, 7, 20, 44], [9], [60, 17, 3, 2, 11, 12, 1] * 9]
NEW = 10
RECURRENT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 256,
}


def texts(model: Path, **options: Any) -> list[list[int]]:
    """Return the greedy tokens of all prompts, which run together."""
    given = {"backend": "cpu", "dtype": "float32", "max_length": 128, "max_sequences": 4, **options}
    with hal.LLM(model, **given) as llm:
        found = llm.generate(PROMPTS, temperature=0.0, repetition_penalty=1.0, max_new_tokens=NEW, ignore_eos=True)
        return [list(each.token_ids) for each in found]


def their_texts(model: Any) -> list[list[int]]:
    """Return those of transformers, one prompt after another."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    found = [model.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in PROMPTS]
    return [list(each) for each in found]


@pytest.mark.shows("recurrent layers", "hal.LLM")
@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_recurrent_layers(compiler: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3_5TextConfig(**RECURRENT)).eval()
    randomize(model, 0)
    model.save_pretrained(tmp_path)
    assert texts(tmp_path, compiler=compiler) == their_texts(model)


@pytest.mark.shows("mixtures of experts", "hal.LLM")
def test_experts(tmp_path: Path) -> None:
    model = model_of("Qwen3Moe")
    model.save_pretrained(tmp_path)
    assert texts(tmp_path) == their_texts(model)


@pytest.mark.shows("weights of 8 and 4 bits", "hal.LLM")
@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_low_bits(method: str, tmp_path: Path) -> None:
    quantized, plain = pair(tmp_path, Format(method), **DENSE)
    assert texts(quantized) == texts(plain)
