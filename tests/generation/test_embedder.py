"""Tests that texts are embedded as the files of sentence-transformers say, and that what hal does not do is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import write_json
from helpers.reference import TEXTS
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hal
from hal.checkpoint.checkpoint_files import FolderFiles
from hal.errors import CheckpointError, ConfigError
from hal.generation.llm.embedder import Embedder, Pooling, TextRules


def opened(folder: Path) -> hal.LLM:
    return hal.LLM(folder, backend="cpu", dtype="float32", compiler="eager", config={"cache": {"num_tokens": 512}})


MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}


def embedding_folder(trained: Path, folder: Path, files: dict[str, Any], *, kinds: dict[str, str] = MODULES) -> Path:
    """Return a folder of sentence-transformers: mean pooling, a dense layer of 3 dimensions, and some more files."""
    shutil.copytree(trained, folder)
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in filter(None, MODULES):
        (folder / name).mkdir()
    weight = torch.linspace(-1, 1, 3 * 256, dtype=torch.float32)
    width = json.loads((trained / "config.json").read_text())["hidden_size"]
    save_file({"linear.weight": weight.repeat(width)[: 3 * width].view(3, width)}, folder / "2_Dense/model.safetensors")
    for name, content in ({"1_Pooling/config.json": {}, "2_Dense/config.json": {}} | files).items():
        write_json(folder / name, content)
    return folder


SETTINGS, TEXT_RULES = "config_sentence_transformers.json", "sentence_bert_config.json"
HARMLESS: dict[str, Any] = {
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "model_args": {},
    "unpad_inputs": True,
    "query_length": None,
}


def test_texts_are_embedded_as_the_files_of_sentence_transformers_say(trained: Path, tmp_path: Path) -> None:
    """Prompts, lower case, and the length at which a text is cut, at either side; in hal.LLM and in the server."""
    pytest.importorskip("starlette", reason="hal serve needs the extra serve")
    from helpers.api_server import ask, served

    named = {"prompts": {"query": "FIND: ", "none": None}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    files = {
        SETTINGS: {**named, "truncate_dim": 2, "model_type": "SentenceTransformer"},
        TEXT_RULES: {**HARMLESS, "max_seq_length": 9, "do_lower_case": True},
        "tokenizer_config.json": {"truncation_side": "left"},
    }
    plain = embedding_folder(trained, tmp_path / "plain", {}, kinds={**MODULES, "4_Dropout": "Dropout"})
    with opened(plain) as llm:
        encode = lambda text: llm.tokenizer.encode(text).ids  # noqa: E731
        query, document, long = encode("find: ab cd"), encode("ab cd"), encode(f"find: {TEXTS[2].lower()}")
        assert len(long) > 9 > len(query)
        expected = llm.embed([query, document, long[-9:], document])[:, :2]
        short = llm.embed(long[:5])
    with opened(embedding_folder(trained, tmp_path / "model", files)) as llm:
        found = [llm.embed(["Ab cD"]), llm.embed("Ab cD", prompt_name="document"), llm.embed(TEXTS[2])]
        torch.testing.assert_close(torch.cat([*found, llm.embed("AB CD", prompt_name="none")]), expected)
        torch.testing.assert_close(llm.embed([document]), expected[1:2], msg="token ids stay as they are")
        with pytest.raises(ConfigError, match=r"has no prompt 'quarry'\n.*'query'"):
            llm.embed("a", prompt_name="quarry")
        with served(llm) as address:
            body = json.dumps({"model": "tiny", "input": ["Ab cD", TEXTS[2]]}).encode()
            _, answer, _ = ask(address, "POST", "/v1/embeddings", body, Content_Type="application/json")
        vectors = torch.tensor([each["embedding"] for each in answer["data"]])
        torch.testing.assert_close(vectors, expected[[0, 2]])
        assert answer["usage"]["prompt_tokens"] == len(query) + 9
    limit = {"tokenizer_config.json": {"model_max_length": 5}, SETTINGS: {"prompts": {"query": "find: "}}}
    with opened(embedding_folder(trained, tmp_path / "limit", limit)) as llm:
        torch.testing.assert_close(llm.embed(TEXTS[2].lower(), prompt_name="query"), short)


@pytest.mark.parametrize(
    ("files", "kinds", "problem"),
    [
        ({SETTINGS: {"default_prompt_name": "q"}}, MODULES, "says default_prompt_name 'q'"),
        ({SETTINGS: {"prompts": ["q"]}}, MODULES, r"says prompts \['q'\]"),
        ({SETTINGS: {"prompts": {"q": 3}}}, MODULES, "says prompts"),
        ({SETTINGS: {"model_type": "SparseEncoder"}}, MODULES, "says model_type 'SparseEncoder'"),
        ({SETTINGS: {"truncate_dim": 0}}, MODULES, "says truncate_dim 0"),
        ({TEXT_RULES: {"max_seq_length": "9"}}, MODULES, "says max_seq_length '9'"),
        ({TEXT_RULES: {"query_expansion": {"length": 32}}}, MODULES, "says query_expansion"),
        ({TEXT_RULES: {"modality_config": {"message": {}}}}, MODULES, "says modality_config"),
        ({"1_Pooling/config.json": {"pooling_mode": "weightedmean"}}, MODULES, "the pooling 'weightedmean'"),
        (
            {"1_Pooling/config.json": {"pooling_mode": "weightedmean", "pooling_mode_mean_tokens": True}},
            MODULES,
            "the pooling 'weightedmean'",
        ),
        ({"1_Pooling/config.json": {"pooling_mode": ["mean", "max"]}}, MODULES, r"the pooling \['mean', 'max'\]"),
        (
            {"1_Pooling/config.json": {"include_prompt": False}, SETTINGS: {"prompts": {"query": "q"}}},
            MODULES,
            "leaves out the prompt 'query'",
        ),
        ({"2_Dense/config.json": {"use_residual": True}}, MODULES, "says use_residual True"),
        ({"2_Dense/config.json": {"module_input_name": "token_embeddings"}}, MODULES, "says module_input_name"),
        ({"3_Normalize/config.json": {"module_input_name": "token_embeddings"}}, MODULES, "says module_input_name"),
        ({"2_Dense/config.json": {"bias": True}}, MODULES, "says bias true, and .* no bias"),
        ({}, {"": "Transformer", "2_Dense": "Dense", "1_Pooling": "Pooling"}, "module Pooling behind Dense"),
        ({}, {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Pooling"}, "module Pooling behind Pooling"),
        ({}, {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "LayerNorm"}, "LayerNorm', which hal does not"),
        ({}, {"": "WordEmbeddings", "1_Pooling": "Pooling"}, "WordEmbeddings', which hal does not"),
    ],
)
def test_what_hal_does_not_do_to_texts_is_refused(
    files: dict[str, Any], kinds: dict[str, str], problem: str, trained: Path, tmp_path: Path
) -> None:
    checkpoint = hal.Checkpoint.open(embedding_folder(trained, tmp_path / "model", files, kinds=kinds))
    embedder = Embedder(checkpoint, checkpoint.tokenizer)
    with pytest.raises(CheckpointError, match=problem):
        _ = embedder.tokens("text", "query"), embedder.pooling


def test_code_of_a_checkpoint_is_no_module_of_the_library(trained: Path, tmp_path: Path) -> None:
    folder = embedding_folder(trained, tmp_path / "model", {})
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "custom_st.Transformer"}]))
    with pytest.raises(CheckpointError, match=r"a module 'custom_st\.Transformer', which hal does not have"):
        Pooling.read(folder)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode": ["cls"], "pooling_mode_mean_tokens": True}, "first"),
        ({"pooling_mode": "Max"}, "max"),
        ({"word_embedding_dimension": 8}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
    ],
)
def test_poolings(config: dict[str, Any], mode: str, trained: Path, tmp_path: Path) -> None:
    folder = embedding_folder(trained, tmp_path / "model", {"1_Pooling/config.json": config})
    assert Pooling.read(folder).mode == mode


@pytest.mark.parametrize(("side", "words"), [("right", ["a", "b", "c"]), ("left", ["c", "d", "e"])])
def test_a_text_that_is_cut_keeps_its_special_tokens(side: str, words: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate("abcde<>")}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing("< $A >", special_tokens=[("<", 5), (">", 6)])
    rules = TextRules({}, None, True, 5, side, None)
    assert rules.encode("A B C D E", tokenizer) == [5, *map("abcde".index, words), 6]
    assert rules.encode("a B c", tokenizer) == [5, 0, 1, 2, 6]


def test_the_files_go_with_new_weights(trained: Path, tmp_path: Path) -> None:
    """As `hal quantize` writes them."""
    files = {SETTINGS: {"default_prompt_name": "query"}, TEXT_RULES: {"max_seq_length": 9}}
    folder = embedding_folder(trained, tmp_path / "model", files)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "copy").mkdir()
    FolderFiles(folder).write_beside(tmp_path / "copy")
    assert Pooling.read(tmp_path / "copy").layers
    names = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    copied = {str(each.relative_to(tmp_path / "copy")) for each in (tmp_path / "copy").rglob("*") if each.is_file()}
    assert {name for name in names - copied if not name.endswith((".md", ".safetensors"))} <= {"config.json"}
    assert (tmp_path / "copy" / "2_Dense" / "model.safetensors").is_file()
