"""Tests for GGUF files: values and logits against transformers and against the folder that a file was made of."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from helpers.checkpoints import trained_tokenizer
from helpers.gguf_writing import write_gguf
from helpers.thorough import AGAIN, DRAW, EXHAUSTIVE, FAMILY, thorough
from helpers.tiny_transformers import model_of
from torch import Tensor

import hal
from hal.checkpoint.safetensors_files import TensorSlice
from hal.cli import main
from hal.errors import CheckpointError, HalError
from hal.step import ALL

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen2Moe": {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 64},
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 128},  # transformers does not read another one
    "Qwen3Moe": EXPERTS,
    "Gemma3": {
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 256,
        "head_dim": 256,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "num_hidden_layers": 6,
    },
}
"""By the name of the class, what the configuration has beside that of all."""
READ_BY_TRANSFORMERS = ("Llama", "Qwen2", "Qwen3", "Gemma3")
"""Those whose files transformers reads as the models compute."""
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The types that the package gguf can write."""
VOCABULARY = 320
"""More than the tokenizer has."""
TOKENS = [5, 31, 7, 200, 44, 260, 17, 3, 99, 150, 12, 61]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of a random model of a family, made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        path = root / family
        if not path.exists():
            tokenizer = trained_tokenizer()
            sizes = {
                "vocab_size": VOCABULARY,
                "hidden_size": 64,
                "intermediate_size": 96,
                "eos_token_id": 0,
            }
            model = random_model(family, **sizes)
            model.save_pretrained(path)
            tokenizer.save(str(path / "tokenizer.json"))
        return path

    return folder


def random_model(family: str, **sizes: Any) -> Any:
    if family != "Gemma3":
        from helpers.tiny_transformers import FAMILIES as KNOWN

        KNOWN.setdefault(family, {})
        return model_of(family, **{**FAMILIES[family], **sizes})
    config = transformers.Gemma3TextConfig(
        **{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **FAMILIES[family]}
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * values if "norm" in name else values * parameter.shape[-1] ** -0.5)
    return model


def our_logits(path: Path, dtype: str = "float32") -> Tensor:
    """Return the logits ``[tokens, vocabulary]`` that hal computes for TOKENS."""
    with hal.open({"backend": "cpu", "dtype": dtype}) as backend:
        runner = hal.Runner(hal.load_model(path, backend), backend)
        return runner.step(runner.batch([TOKENS], [[1]]), rows=ALL).logits.clone()


def their_logits(file: Path) -> Tensor:
    """Return those of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.inference_mode():
        return model.eval()(torch.tensor([TOKENS])).logits[0]


def values_of(checkpoint: hal.Checkpoint) -> dict[str, Tensor]:
    return {name: values.float().clone() for name, values in checkpoint.read(checkpoint.tensors)}


@thorough(FAMILY, r"\[(Mixtral|Qwen2|Qwen3)\]")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_read_as_the_folder_that_it_was_made_of(
    family: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders(family)
    file = write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = hal.Checkpoint.open(file), hal.Checkpoint.open(folder)
    assert ours.architecture == theirs.architecture
    assert torch.equal(our_logits(file), our_logits(folder))


@thorough(EXHAUSTIVE, r"-(Q5_[01]|Q4_1|F16|BF16)")
@thorough(DRAW, r"Llama-(?!F32|Q4_1)|(Qwen2|Qwen3|Gemma3)-(?!Q8_0)")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_logits_are_those_of_transformers_for_the_same_file(
    family: str, kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf(folders(family), tmp_path / "model.gguf", kind=kind)
    ours, theirs = our_logits(file), their_logits(file)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("family", ["Llama", "Qwen2Moe"])
def test_slices_are_parts_of_whole_tensors(family: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = hal.Checkpoint.open(write_gguf(folders(family), tmp_path / "model.gguf", kind="Q8_0"))
    draw = random.Random(7)
    whole = values_of(checkpoint)
    for name, info in checkpoint.tensors.items():
        for _ in range(4):
            taken = tuple(tuple(sorted((draw.randint(0, size), draw.randint(0, size)))) for size in info.shape)
            parts = list(checkpoint.read_slices([TensorSlice(name, taken)]))  # type: ignore[arg-type]
            found = torch.cat([values for *_, values in parts])
            assert parts[0][1] == 0
            assert torch.equal(found, whole[name][tuple(slice(*each) for each in taken)]), (name, taken)


def test_large_tensors_are_read_in_parts(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hal.checkpoint.gguf import gguf_files

    checkpoint = hal.Checkpoint.open(write_gguf(folders("Llama"), tmp_path / "model.gguf", kind="Q4_0"))
    whole = values_of(checkpoint)
    monkeypatch.setattr(gguf_files, "READ_BYTES", 4 * 64 * 20)
    name = "model.layers.0.self_attn.q_proj.weight"
    parts = list(checkpoint.read_slices([TensorSlice(name, ((3, 61), (0, 64)))]))
    assert [start for _, start, _ in parts] == [0, 13, 29, 45]
    assert torch.equal(torch.cat([values for *_, values in parts]), whole[name][3:61])


def test_the_dtype_is_that_of_most_weights(folders: Callable[[str], Path], tmp_path: Path) -> None:
    for kind, dtype in {"F32": torch.float32, "F16": torch.float16, "Q4_1": torch.bfloat16}.items():
        assert hal.Checkpoint.open(write_gguf(folders("Qwen3"), tmp_path / f"{kind}.gguf", kind=kind)).dtype == dtype


def test_split_files(folders: Callable[[str], Path], tmp_path: Path) -> None:
    whole = write_gguf(folders("Qwen3"), tmp_path / "whole.gguf")
    write_gguf(folders("Qwen3"), tmp_path / "model.gguf", split=9)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3
    expected = values_of(hal.Checkpoint.open(whole))
    for each in (parts[0], parts[2]):
        found = values_of(hal.Checkpoint.open(each))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    renamed = parts[1].rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"one of 3 files, and model-00002-of-00003\.gguf is missing"):
        hal.Checkpoint.open(parts[0])
    with pytest.raises(CheckpointError):
        hal.Checkpoint.open(renamed)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(
    more: dict[str, Any], expected: dict[str, Any] | None, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    metadata = {f"qwen3.{key}": value for key, value in more.items()}
    checkpoint = hal.Checkpoint.open(write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata=metadata))
    assert checkpoint.config.get("rope_scaling") == expected
    with hal.open("cpu") as backend:
        hal.load_model(checkpoint, backend)


def test_llama_3_is_recognized_by_its_divisors(folders: Callable[[str], Path], tmp_path: Path) -> None:
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **parameters}
    theirs = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 5e5 ** -(torch.arange(0, 16, 2) / 16)
    file = write_gguf(
        folders("Llama"), tmp_path / "model.gguf", tensors={"rope_freqs.weight": (plain / inverse).numpy()}
    )
    assert hal.Checkpoint.open(file).config["rope_scaling"] == {"rope_type": "llama3", "factor": 32.0, **parameters}
    wrong = np.linspace(1, 30, 8, dtype=np.float32)
    file = write_gguf(folders("Llama"), tmp_path / "wrong.gguf", tensors={"rope_freqs.weight": wrong})
    with pytest.raises(CheckpointError, match="other divisors of frequencies than Llama 3's"):
        hal.Checkpoint.open(file)


TEXTS = [
    "the cat sat on the mat",
    "  two  spaces, 12345 numbers and 3.14\n\n\tdon't I'LL\u00a0x",
    "é 日本 🙂 \u0301 <|endoftext|> after",
    "",
    " ",
    "def f(x):\n        return x\n",
]


def test_a_byte_level_tokenizer_is_the_one_that_the_file_was_made_of(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folders("Qwen3")
    checkpoint = hal.Checkpoint.open(write_gguf(folder, tmp_path / "model.gguf"))
    ours, theirs = checkpoint.tokenizer(), hal.Checkpoint.open(folder).tokenizer()
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2"])
def test_texts_are_cut_as_transformers_cuts_them(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    more = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
    file = write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata=more)
    ours = hal.Checkpoint.open(file).tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").backend_tokenizer
    for text in TEXTS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_digits_are_cut_one_by_one(folders: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": "smollm"})
    pieces = hal.Checkpoint.open(file).tokenizer().pre_tokenizer.pre_tokenize_str("a 123  b")
    assert [piece for piece, _ in pieces] == ["a", "Ġ", "1", "2", "3", "Ġ", "Ġb"]


SENTENCEPIECE = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    ("\n\n", 0.0, 4),
    ("  ", 0.0, 4),
    *(
        (text, -float(rank), 1)
        for rank, text in enumerate(["▁t", "he", "▁the", "at", "▁c", "▁cat", *"▁abcdefghijklmnopqrstuvwxyz.'"])
    ),
]


PLAIN = {
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("key", "message", "expected"),
    [
        ("pre", "text is cut by llama.cpp's default", ["123", "4", "...", " ", " b"]),
        ("token_type", "no token is special", ["1234", "...", " ", " b"]),
        ("eos_token_id", "names no token that ends a text", ["1234", "...", " ", " b"]),
    ],
)
def test_metadata_that_older_files_lack_are_warned_about_once(
    key: str,
    message: str,
    expected: list[str],
    folders: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    more = {**PLAIN, f"tokenizer.ggml.{key}": None}
    checkpoint = hal.Checkpoint.open(write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata=more))
    pieces = checkpoint.tokenizer().pre_tokenizer.pre_tokenize_str("1234...  b")
    _ = checkpoint.stop_token_ids, checkpoint.tokenizer(), checkpoint.files.json("tokenizer_config.json")
    assert [piece.replace("Ġ", " ") for piece, _ in pieces] == expected
    assert caplog.text.count(message) == caplog.text.count("hal.checkpoint") == 1


@pytest.mark.parametrize(
    ("family", "kind", "token", "kept"),
    [
        ("Qwen3", "gpt2", "<|im_end|>", True),
        ("Qwen3", "gpt2", "</s>", False),
        ("Qwen3", "llama", "</s>", True),
        ("Gemma3", "llama", "<end_of_turn>", True),
        ("Gemma3", "llama", "</s>", False),
    ],
)
@pytest.mark.parametrize("stated", [1, 4])
def test_known_endings_end_whatever_type_the_file_says(
    family: str,
    kind: str,
    token: str,
    kept: bool,
    stated: int,
    folders: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    more = {
        **PLAIN,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [*PLAIN["tokenizer.ggml.tokens"], token],
        "tokenizer.ggml.token_type": [1, 1, 1, stated],
    }
    checkpoint = hal.Checkpoint.open(write_gguf(folders(family), tmp_path / "model.gguf", metadata=more))
    assert (3 in checkpoint.stop_token_ids) == kept
    whole = 3 in checkpoint.tokenizer().encode(f"a{token}b", add_special_tokens=False).ids
    assert whole == (kept or stated == 4)
    assert (f"{token!r} is no control token" in caplog.text) == kept


@pytest.mark.parametrize(("family", "prefix"), [("Qwen3", True), ("Gemma3", False)])
def test_a_sentencepiece_tokenizer_is_that_of_transformers(
    family: str, prefix: bool, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    tokens, scores, kinds = (list(each) for each in zip(*SENTENCEPIECE, strict=True))
    more = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # as without the keys
    more |= {f"tokenizer.ggml.{key}": value if prefix else None for key, value in ids.items()}
    ours = hal.Checkpoint.open(write_gguf(folders(family), tmp_path / "model.gguf", metadata=more)).tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert ours.encode("").ids == [1]
    for text in ("the cat", " the  cat.", "a é 🙂\n\nb", "the</s> at", "\n", ""):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text).ids == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == text.removeprefix(" " if prefix else "")
    assert ours.encode("the cat").tokens == (["<s>", "▁the", "▁cat"] if prefix else ["<s>", "t", "he", "▁cat"])
    assert "\n\n" in ours.encode("a\n\nb").tokens


@pytest.mark.shows("GGUF files", "hal.LLM")
@pytest.mark.shows("conversations", "hal.LLM")
def test_template_stop_tokens_and_sampling_come_from_the_metadata(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    more = {"general.sampling.temp": 0.7, "general.sampling.top_k": 5, "tokenizer.ggml.eos_token_id": 4}
    file = write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata=more)
    checkpoint = hal.Checkpoint.open(file)
    assert checkpoint.stop_token_ids == {0, 4}  # <|endoftext|> is 0
    with hal.LLM(file, backend="cpu") as llm:
        assert llm.defaults == {"temperature": 0.7, "top_k": 5}
        text = llm.tokenizer.decode(
            llm.chat_prompt([{"role": "user", "content": "the cat"}]), skip_special_tokens=False
        )
        assert text == "<user>the cat<assistant>"
        assert llm.chat([{"role": "user", "content": "the"}], max_new_tokens=3, temperature=0)[0].token_ids


def generated(*arguments: object) -> list[dict[str, Any]]:
    options = ("--prompt", "the cat", "--max-new-tokens", 6, "--greedy", "--dtype", "float32", "--json")
    result = CliRunner().invoke(main, ["generate", *map(str, (*arguments, *options))])
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.shows("GGUF files", "the command")
@thorough(AGAIN)
def test_the_command_continues_a_file_as_its_folder(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("Llama")
    file = write_gguf(folder, tmp_path / "model.gguf")
    assert generated(file, "--backend", "cpu") == generated(folder, "--backend", "cpu")
    assert generated(file, "--backend", "cpu", "--compiler", "graph") == generated(folder, "--backend", "cpu")


def test_a_file_can_be_quantized_and_explained(folders: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf(folders("Llama"), tmp_path / "model.gguf", kind="Q8_0")
    result = CliRunner().invoke(main, ["quantize", str(file), str(tmp_path / "int8"), "--scheme", "w8a16"])
    assert result.exit_code == 0, result.output
    made = hal.Checkpoint.open(tmp_path / "int8")
    assert made.tokenizer().encode(TEXTS[0]).ids == hal.Checkpoint.open(file).tokenizer().encode(TEXTS[0]).ids
    assert made.stop_token_ids == {0}
    whole, small = our_logits(file), our_logits(tmp_path / "int8")
    assert (whole - small).abs().max() < 0.1 * whole.abs().max()
    result = CliRunner().invoke(main, ["explain", str(file), "--backend", "cpu"])
    assert result.exit_code == 0, result.output


# What follows are files that are damaged or hostile.


def integer(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return integer(len(value.encode())) + value.encode()


def header(
    keys: list[bytes] | None = None, tensors: list[bytes] | None = None, *, counts: tuple[int, int] | None = None
) -> bytes:
    """Return a file with metadata and descriptions of tensors, and 64 bytes of data."""
    keys, tensors = keys or [], tensors or []
    found = counts or (len(tensors), len(keys))
    content = b"GGUF" + struct.pack("<IQQ", 3, *found) + b"".join(keys) + b"".join(tensors)
    return content + bytes(-len(content) % 32) + bytes(64)


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(map(integer, shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def value(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


MANY = 1 << 60
NESTED = struct.pack("<IQ", 9, 1) * 5000
DAMAGED: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "short": (b"GGUF\3", "truncated"),
    "text": (b"hello, world, hello", r"no GGUF file: it begins with b'hell'"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (header(counts=(MANY, 0)), "declares 1152921504606846976 tensors"),
    "many keys": (header(counts=(0, MANY)), "declares 1152921504606846976 keys"),
    "more keys than there are": (header(counts=(0, 3)), "cannot be read"),
    "a long key": (header([integer(MANY)]), "truncated"),
    "a long text": (header([text("k") + struct.pack("<IQ", 8, MANY)]), "truncated"),
    "no text": (header([value("k", 8, integer(2) + b"\xff\xfe")]), "is not UTF-8"),
    "a long array": (header([value("k", 9, struct.pack("<IQ", 4, MANY))]), "truncated"),
    "a long array of texts": (header([value("k", 9, struct.pack("<IQ", 8, MANY))]), "texts in 'k'"),
    "nested arrays": (header([value("k", 9, NESTED)]), "an array of arrays"),
    "an unknown value": (header([value("k", 77, b"")]), "the unknown type 77"),
    "an array of unknown values": (header([value("k", 9, struct.pack("<IQ", 77, 1))]), "the unknown type 77"),
    "a number that is none": (header([value("k", 6, struct.pack("<f", float("nan")))]), "'k' is nan"),
    "a key twice": (header([value("k", 0, b"\1")] * 2), "occurs twice"),
    "an alignment of 3": (header([value("general.alignment", 4, struct.pack("<I", 3))]), "general.alignment is 3"),
    "no alignment": (header([value("general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "a tensor twice": (header([], [tensor()] * 2), "occurs twice"),
    "no dimensions": (header([], [tensor(shape=())]), "has 0 dimensions"),
    "many dimensions": (header([], [tensor(shape=(1,) * 9)]), "has 9 dimensions"),
    "an empty dimension": (header([], [tensor(shape=(0,))]), r"has the shape \[0\]"),
    "sizes that overflow": (header([], [tensor(shape=(1 << 32, 1 << 32))]), "the file has"),
    "a huge tensor": (header([], [tensor(shape=(1 << 50,))]), "the file has"),
    "an offset outside": (header([], [tensor(offset=1 << 63)]), "the file has"),
    "an offset near the end": (header([], [tensor(offset=56)]), "the file has"),
    "an unknown type of tensors": (header([], [tensor(kind=99)]), "has the type 99"),
    "a broken block": (header([], [tensor(kind=8, shape=(31,))]), "blocks of 32"),
    "no architecture": (header([], [tensor()]), "has no general.architecture"),
    "an unknown architecture": (
        header([value("general.architecture", 8, text("rwkv9"))]),
        "'rwkv9', which hal does not",
    ),
    "an architecture that is a number": (header([value("general.architecture", 4, bytes(4))]), "expected a text"),
    "an adapter": (header([value("general.type", 8, text("adapter"))]), "is no model: its general.type is 'adapter'"),
    "no tensors": (header([value("general.architecture", 8, text("llama"))]), "has no token_embd.weight"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_and_hostile_files_are_errors(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        hal.Checkpoint.open(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"qwen3.block_count": 4000000000}, "declares 4000000000 layers, and has the tensors of 2"),
        ({"qwen3.block_count": 1}, "declares 1 layers"),
        ({"qwen3.attention.head_count": 0}, "num_attention_heads"),
        ({"qwen3.attention.head_count": 3}, "num_attention_heads, 3"),
        ({"qwen3.attention.head_count": [4, 2]}, r"\[4, 2\], expected an integer"),
        ({"qwen3.embedding_length": 128}, "do not fit"),
        ({"qwen3.context_length": None}, r"has no qwen3\.context_length"),
        ({"qwen3.rope.freq_base": 0.0}, "rope_theta"),
        ({"qwen3.rope.scaling.type": "magic"}, "rope.scaling.type is 'magic'"),
        ({"qwen3.rope.scaling.type": "yarn"}, "yarn, and there is no rope.scaling.factor"),
        ({"qwen3.attention.logit_scale": 2.0}, "which hal does not read, and which may change"),
        ({"split.count": 3}, "is one of 3 files"),
        ({"split.tensors.count": 3}, "declares 3 tensors"),
    ],
)
def test_metadata_that_make_no_model_are_errors(
    metadata: dict[str, Any], message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata=metadata)
    with hal.open("cpu") as backend, pytest.raises(HalError, match=message):
        hal.load_model(file, backend)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "a tokenizer of the kind 'rwkv'"),
        ({"tokenizer.ggml.pre": "newest"}, "the pre-tokenizer 'newest'"),
        ({"tokenizer.ggml.merges": ["nothing here"]}, "a damaged tokenizer"),
        ({"tokenizer.ggml.eos_token_id": 100000}, "eos_token_id 100000"),
        ({"tokenizer.ggml.tokens": ["a"] * 5000}, "has 5000 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "expected a list of str"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.add_bos_token": True}, "has add_bos_token true, and no bos_token_id"),
    ],
)
def test_tokenizers_that_make_no_sense_are_errors(
    metadata: dict[str, Any], message: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = hal.Checkpoint.open(write_gguf(folders("Qwen3"), tmp_path / "model.gguf", metadata=metadata))
    with pytest.raises(CheckpointError, match=message):
        _ = checkpoint.tokenizer(), checkpoint.stop_token_ids


def test_every_truncation_and_many_changes_are_errors_or_harmless(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    content = write_gguf(folders("Qwen2"), tmp_path / "whole.gguf", kind="Q8_0").read_bytes()
    size = content.index(b"output_norm.weight")  # in the descriptions, after the metadata
    file, seed = tmp_path / "model.gguf", random.randrange(1 << 32)
    draw = random.Random(seed)
    logging.info("seed %d", seed)
    for cut in (*range(0, size, max(1, size // 150)), len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError):
            hal.Checkpoint.open(file)
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(size + 2000)] = draw.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(HalError):
            checkpoint = hal.Checkpoint.open(file)
            _ = checkpoint.stop_token_ids, checkpoint.files.json("tokenizer_config.json"), checkpoint.tokenizer()
            with hal.open("cpu") as backend:
                hal.load_model(checkpoint, backend)
