"""Tests that text is returned in complete characters, in order, and as early as possible."""

from __future__ import annotations

from os.path import commonprefix

import pytest
from helpers.checkpoints import trained_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from hal.generation.generate import Piece, texts_in_order
from hal.generation.generated_text import TextStream
from hal.generation.request import Token
from hal.generation.sampling_params import SamplingParams

BYTE_LEVEL = trained_tokenizer()
TOKENS = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=20)  # models may have more rows
PARAMS = [SamplingParams(stop_token_ids={0})] * 3


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_fallback() -> Tokenizer:
    """A tokenizer like SentencePiece, whose decoder changes earlier text when later bytes are invalid."""
    pieces = ["<unk>", *BYTES, "▁the", "▁", "a", "é", "▁日"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


WORDS = ["\u2581", "\u2581a", "a", "\u2581the", "\u2581\u65e5", "\u00e9", "\u0301"]


def unigram() -> Tokenizer:
    """A tokenizer like that of SentencePiece's unigram model, whose decoder drops the first space."""
    pieces = [("<unk>", 0.0), *((each, -20.0) for each in BYTES), *((each, -1.0 - len(each)) for each in WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def word_pieces(cleanup: bool) -> Tokenizer:
    """A tokenizer like BERT's, whose decoder puts spaces between words."""
    words = ["[UNK]", *"a\u00e9\u65e5\U0001f600.!'t", "the", "don", "##a", "##\u0301", "##the", "##\u200d", "n't"]
    tokenizer = Tokenizer(models.WordPiece({each: index for index, each in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##", cleanup)
    return tokenizer


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.push, tokens), stream.flush()]


@settings(deadline=None)
@given(st.text(max_size=12), TOKENS)
def test_the_parts_make_the_whole(prompt: str, tokens: list[int]) -> None:
    context = BYTE_LEVEL.encode(prompt).ids
    parts = streamed(BYTE_LEVEL, context, tokens)
    assert BYTE_LEVEL.decode(context) + "".join(parts) == BYTE_LEVEL.decode(context + tokens)


@settings(deadline=None)
@given(st.text())
def test_characters_are_never_split(text: str) -> None:
    parts = streamed(BYTE_LEVEL, [], BYTE_LEVEL.encode(text).ids)
    assert "".join(parts) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not parts[-1], "complete characters must not be held back"


def test_a_prompt_may_end_inside_a_character() -> None:
    """For example, a prompt that continues token ids of an earlier run."""
    text = "x = '\u65e5\u672c'"  # three bytes each
    tokens = BYTE_LEVEL.encode(text).ids
    inside = 0
    for cut in range(len(tokens)):
        before = BYTE_LEVEL.decode(tokens[:cut])
        inside += before.endswith("\N{REPLACEMENT CHARACTER}")
        whole = before.rstrip("\N{REPLACEMENT CHARACTER}")
        assert whole + "".join(streamed(BYTE_LEVEL, tokens[:cut], tokens[cut:])) == text
    assert inside


@settings(deadline=None)
@given(st.lists(st.integers(0, 261), max_size=20))
def test_any_tokens_of_any_tokenizer_can_be_read(tokens: list[int]) -> None:
    tokenizer = byte_fallback()
    "".join(streamed(tokenizer, [257], tokens)).encode()


@settings(deadline=None)
@given(st.text("a\u00e9 \u65e5\U0001f600\u0301\U0001f1e9\U0001f1ea", max_size=8), st.data())
def test_emoji_cut_anywhere_join_to_the_text_with_byte_fallback(text: str, data: st.DataObject) -> None:
    """Each byte is a token, so that every character of more than one byte is cut."""
    tokenizer = byte_fallback()
    tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    parts = streamed(tokenizer, [257], tokens)
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    cut = tokens[: data.draw(st.integers(0, len(tokens)))]
    found = "".join(streamed(tokenizer, [257], cut)).rstrip("\N{REPLACEMENT CHARACTER}")
    assert text.startswith(found)


KINDS = {
    "byte-level": BYTE_LEVEL,
    "byte fallback": byte_fallback(),
    "unigram": unigram(),
    "words": word_pieces(False),
    "words without spaces before points": word_pieces(True),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(st.text("at\u00e9 .'\u65e5\U0001f600\u0301\u200d\U0001f1e9\U0001f1ea", max_size=12), st.data())
def test_pieces_of_every_kind_of_tokenizer_join_to_the_text(kind: str, text: str, data: st.DataObject) -> None:
    """Wherever the prompt ends, in a character of several tokens, too."""
    tokenizer = KINDS[kind]
    tokens = tokenizer.encode(text).ids
    whole = tokenizer.decode(tokens)
    cut = data.draw(st.integers(0, len(tokens)))
    parts = streamed(tokenizer, tokens[:cut], tokens[cut:])
    known = commonprefix((tokenizer.decode(tokens[:cut]), whole))  # noqa: RUF071 - of characters, not of paths
    assert known + "".join(parts) == whole
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize(("prompt", "expected"), [([], ["the", " the"]), ([257], [" the", " the"])])
def test_a_word_reads_as_it_does_after_the_prompt(prompt: list[int], expected: list[str]) -> None:
    assert streamed(byte_fallback(), prompt, [257, 257]) == [*expected, ""]


def test_special_tokens_are_not_text() -> None:
    cat = BYTE_LEVEL.encode("cat").ids
    assert "".join(streamed(BYTE_LEVEL, [0], [0, *cat, 0, *cat])) == "catcat"


def test_texts_take_turns() -> None:
    a, b = BYTE_LEVEL.encode("a").ids[0], BYTE_LEVEL.encode("b").ids[0]
    steps = [
        [Token(0, a, None), Token(1, b, None), Token(2, b, "length")],
        [Token(0, a, "length"), Token(1, 0, "stop")],
    ]
    tokens = (token for step in steps for token in step)
    pieces = texts_in_order(tokens, [[a], [a], [a]], BYTE_LEVEL, PARAMS)
    assert next(pieces) == Piece(0, "a", a, None)
    assert next(tokens) == Token(1, b, None), "the first text must not wait"
    pieces = texts_in_order((token for step in steps for token in step), [[a], [a], [a]], BYTE_LEVEL, PARAMS)
    expected = [(0, "a", a, None), (0, "a", a, "length"), (1, "b", b, None), (1, "", 0, "stop"), (2, "b", b, "length")]
    assert list(pieces) == [Piece(*each) for each in expected]


def test_a_text_that_ends_inside_a_character_says_so() -> None:
    first, *_ = BYTE_LEVEL.encode("\u00ff").ids  # two bytes, which the tokenizer did not merge
    assert streamed(BYTE_LEVEL, [], [first]) == ["", "\N{REPLACEMENT CHARACTER}"]
    pieces = list(texts_in_order([Token(0, first, "length")], [[1]], BYTE_LEVEL, PARAMS[:1]))
    assert pieces == [Piece(0, "\N{REPLACEMENT CHARACTER}", first, "length")]
