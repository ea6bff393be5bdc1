"""Tests for tokenizers with files beside tokenizer.json, against the token ids and texts of transformers 5."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.checkpoints import random_checkpoint, trained_tokenizer, write_json
from helpers.comparison import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.tokenizer_files import read_tokenizer
from hal.cli import main
from hal.errors import CheckpointError

CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
TEXTS = (
    "the cat sat on the mat <s> and <a> the rat  <|endoftext|> x",
    "  <t> hat<b>mat <x>the <img> é 日本",
    "",
    " the cat",
    "<pad>on<c>",
    "<s>the rat</s><|endoftext|>",
)


def token(draw: random.Random, text: str) -> str | dict[str, Any]:
    """Draw a spelling of a token: its text, or an object with flags."""
    flags = {"lstrip": draw.random() < 0.5, "rstrip": draw.random() < 0.5, "normalized": False, "single_word": False}
    return text if draw.random() < 0.5 else {"content": text, **flags, "__type": "AddedToken"}


def declared(draw: random.Random, text: str) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": text, **{name: draw.random() < 0.4 for name in names}}


def drawn(draw: random.Random, folder: Path) -> None:
    """Write a tokenizer, and draw which files are beside it, and what they declare."""
    tokenizer = trained_tokenizer()
    if draw.random() < 0.6:
        tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    if draw.random() < 0.5:
        tokenizer.add_tokens([AddedToken("mat", lstrip=draw.random() < 0.5, normalized=draw.random() < 0.5)])
    if (start := tokenizer.token_to_id("<s>")) is not None and draw.random() < 0.4:
        template = draw.choice(("<s> $A", "<s> $A <|endoftext|>", "$A <|endoftext|>"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", start), ("<|endoftext|>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": draw.choice(CLASSES)}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if draw.random() < 0.5:
            text = draw.choice(("<s>", "<|endoftext|>", "<pad>", "rat", None))
            config[key] = text and token(draw, text)
    for key in (
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "clean_up_tokenization_spaces",
        "split_special_tokens",
    ):
        if draw.random() < 0.4:
            config[key] = draw.random() < 0.5
    if draw.random() < 0.4:
        config["image_token"] = "<img>"
    if draw.random() < 0.4:
        key = draw.choice(("additional_special_tokens", "extra_special_tokens"))
        config[key] = draw.choice((["<a>", "cat"], ["<|endoftext|>"], []))
    if draw.random() < 0.2:
        config["extra_special_tokens"] = {"x_token": "<x>"}
    if draw.random() < 0.5:
        candidates = [(0, "<|endoftext|>"), (300, "<t>"), (299, "sat"), (301, "hat"), (302, "<a>")]
        config["added_tokens_decoder"] = {str(i): declared(draw, text) for i, text in draw.sample(candidates, 3)}
    write_json(folder / "tokenizer_config.json", config)
    if draw.random() < 0.3:
        special = {key: each for key, each in declared(draw, "<s>").items() if key != "special"}
        more = {"additional_special_tokens": ["<b>", "on"]} if draw.random() < 0.5 else {}
        write_json(folder / "special_tokens_map.json", {"bos_token": draw.choice(("<s>", special)), **more})
    if draw.random() < 0.3:
        write_json(folder / "added_tokens.json", {"<b>": 310, "<c>": 309})


def check(folder: Path) -> None:
    ours, theirs = read_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("part", range(4))
def test_random_files(part: int, tmp_path: Path) -> None:
    for seed in range(part * 25, part * 25 + 25):
        print(f"seed {seed}")  # noqa: T201 - pytest shows it if the test fails
        folder = tmp_path / str(seed)
        folder.mkdir()
        drawn(random.Random(seed), folder)
        check(folder)


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    drawn(random.Random(3), tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (tmp_path / name).unlink(missing_ok=True)
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert read_tokenizer(tmp_path).encode(text).ids == expected.encode(text).ids
        assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)(text).input_ids == (
            expected.encode(text).ids
        )


def template(folder: Path, single: str) -> None:
    tokenizer = trained_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [(each, tokenizer.token_to_id(each)) for each in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("add_bos", [None, False, True])
@pytest.mark.parametrize("add_eos", [None, False, True])
@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_flags_that_versions_read_differently(
    single: str, add_eos: bool | None, add_bos: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 5 of transformers reads neither; earlier versions of some classes do. hal warns if they contradict."""
    template(tmp_path, single)
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "tokenizer_class": CLASSES[0],
            "bos_token": "<s>",
            "eos_token": "</s>",
            **{key: value for key, value in flags.items() if value is not None},
        },
    )
    with caplog.at_level(logging.WARNING, logger="hal.checkpoint"):
        check(tmp_path)
    warned = {key for key in flags if any(f": {key} is" in record.getMessage() for record in caplog.records)}
    adds = {"add_bos_token": "<s>" in single, "add_eos_token": "</s>" in single}
    assert warned == {key for key, value in flags.items() if value is not None and value != adds[key]}


def sentencepiece(older: bool) -> Tokenizer:
    """Return a tokenizer like those of Llama 2, with a normalizer as older versions of transformers wrote them."""
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    if older:
        spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    named = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*named, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the rat sat on the hat"] * 3, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["content"] in named]
    made = Tokenizer.from_str(json.dumps(content))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", [*CLASSES, "LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_classes_of_llama(
    model_type: str, name: str, older: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sentencepiece(older).save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"model_type": model_type})
    draw = random.Random(f"{model_type} {name} {older}")
    pieces = ("the", " cat", "  ", "<s>", "</s>", "x", "é", "\n", " mat ", "<unk>")
    for legacy in (None, False, True):
        for prefix in (None, False, True):
            given = {"legacy": legacy, "add_prefix_space": prefix}
            config = {"tokenizer_class": name, **{key: each for key, each in given.items() if each is not None}}
            write_json(tmp_path / "tokenizer_config.json", config)
            ours, theirs = read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
            for _ in range(30):
                text = "".join(draw.choices(pieces, k=draw.randrange(8)))
                ids = theirs(text).input_ids
                assert ours.encode(text).ids == ids, (config, text)
                assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), (config, text)
    caplog.clear()
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    read_tokenizer(tmp_path)
    rebuilt = older and name.startswith("Llama") and model_type not in ("mistral", "mixtral")
    assert bool([each for each in caplog.records if "tokenizer_class is" in each.getMessage()]) == rebuilt


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"add_prefix_space": True}, "add_prefix_space is true, but false in tokenizer.json"),
        ({"add_prefix_space": False}, None),
        ({"clean_up_tokenization_spaces": True}, None),  # not of BPE, whose texts transformers leaves as they are
        ({"split_special_tokens": True}, None),
    ],
)
def test_other_flags(
    config: dict[str, Any], message: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template(tmp_path, "<s> $A")
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": CLASSES[0], **config})
    with caplog.at_level(logging.WARNING, logger="hal.checkpoint"):
        check(tmp_path)
    texts = " ".join(each.getMessage() for each in caplog.records if each.name == "hal.checkpoint")
    assert (message in texts) if message else not texts


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"bos_token": 3}),
        ("tokenizer_config.json", {"additional_special_tokens": [3]}),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<s>"]}),
        ("added_tokens.json", {"<b>": "x"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<s>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": {"content": "<s>", "lstrip": "yes"}}}),
        ("special_tokens_map.json", {"eos_token": {"text": "x"}}),
    ],
)
def test_damaged_files(file: str, content: dict[str, Any], tmp_path: Path) -> None:
    template(tmp_path, "$A")
    write_json(tmp_path / file, content)
    with pytest.raises(CheckpointError, match=r"special tokens beside .*tokenizer.json cannot be read"):
        read_tokenizer(tmp_path)


def test_the_command_has_the_ids_of_transformers(tmp_path: Path) -> None:
    """A token of tokenizer_config.json in a prompt is one token, so that the text after it is that of its ids."""
    folder = random_checkpoint(tmp_path, vocab_size=300)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": CLASSES[0], "extra_special_tokens": ["the cat"]})
    prompt = "the cat sat"
    ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt).input_ids
    assert Checkpoint.open(folder).tokenizer().encode(prompt).ids == ids
    assert len(ids) < len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids)
    made = CliRunner().invoke(
        main, ["generate", str(folder), "--prompt", prompt, "--max-new-tokens", "4", "--backend", "cpu"]
    )
    assert made.exit_code == 0, made.output
