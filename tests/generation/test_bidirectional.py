"""Tests of models whose tokens attend to later ones, in the form of EmbeddingGemma: a Gemma 3 without head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_json
from helpers.reference import open_runner
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, Gemma3TextModel

import hal
from hal.errors import BatchError
from hal.step import NONE

TEXTS = ["import os", "def open(path):\n    return path", "Return the first line of the file, and close it. " * 4]
TOKENS = [[5, 9, 2, 7, 1, 3, 8], [4], list(range(10, 40))]
BLOCKS = [[1, 2], [3], [4, 5, 6]]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=10,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
    )
    model = Gemma3TextModel(config).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def folder(model: Any, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers writes it: mean pooling, two dense layers, and a norm."""
    folder = tmp_path_factory.mktemp("embedding")
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Gemma3TextModel"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / name, folder)
    kinds = {
        "": "Transformer",
        "1_Pooling": "Pooling",
        "2_Dense": "Dense",
        "3_Dense": "Dense",
        "4_Normalize": "Normalize",
    }
    write_json(
        folder / "modules.json",
        [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()],
    )
    (folder / "1_Pooling").mkdir()
    write_json(
        folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    )
    for name, sizes in (("2_Dense", (128, 64)), ("3_Dense", (64, 128))):
        (folder / name).mkdir()
        save_file({"linear.weight": torch.randn(sizes)}, folder / name / "model.safetensors")
        write_json(folder / name / "config.json", {"activation_function": "torch.nn.modules.linear.Identity"})
    return folder


def hidden(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return found


@pytest.mark.parametrize("compiler", ["eager", "graph", "piecewise"])
def test_hidden_states_are_those_of_transformers(compiler: str, model: Any, folder: Path) -> None:
    runner = open_runner(folder, compiler)
    output = runner.step(runner.batch(TOKENS, BLOCKS), rows=NONE)
    wanted = torch.cat([hidden(model, tokens) for tokens in TOKENS])
    torch.testing.assert_close(output.hidden_states, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.shows("embeddings", "hal.LLM")
def test_embeddings(model: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    with hal.LLM(folder, backend="cpu", dtype="float32", compiler="eager") as llm:
        ids = [llm.tokenizer.encode(text).ids for text in TEXTS]
        found = llm.embed(TEXTS)
    for tokens, vector in zip(ids, found, strict=True):
        expected = hidden(model, tokens).mean(0)
        for name in ("2_Dense", "3_Dense"):
            expected = load_file(folder / name / "model.safetensors")["linear.weight"] @ expected
        torch.testing.assert_close(vector, torch.nn.functional.normalize(expected, dim=-1), atol=1e-4, rtol=0)


def test_a_sequence_in_several_steps_is_refused(folder: Path) -> None:
    runner = open_runner(folder)
    runner.step(runner.batch([[5, 9]], [[1]]), rows=NONE)
    with pytest.raises(
        BatchError, match="sequence 0 has 1 new tokens and 2 in the cache, and the model's tokens attend"
    ):
        runner.step(runner.batch([[4]], [[1]], cached=[2]), rows=NONE)
    with hal.LLM(folder, backend="cpu", dtype="float32", config={"max_prefill_tokens": 16}) as llm:
        with pytest.raises(BatchError, match="tokens attend to later ones"):
            llm.embed(TEXTS[2])
        with pytest.raises(BatchError, match="such a model generates no text"):
            llm.generate(TEXTS[0], max_new_tokens=4)
        assert llm.embed(TEXTS[0]).shape == (1, 64)
