"""The tokenizer that the metadata of a GGUF file describe: byte-level BPE, or SentencePiece with byte fallback.

Source: the vocabularies of llama.cpp, whose names of pre-tokenizers the files have, and the published tokenizer.json
files of the models that each is named after.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from hal.checkpoint.gguf.metadata import Metadata
from hal.checkpoint.tokenizer_files import ENDINGS
from hal.errors import CheckpointError, listed

log = logging.getLogger("hal.checkpoint")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""The types of tokens."""
NAMED = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
NAMED |= {"pad_token": "padding_token_id"}
ENDING_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SENTENCEPIECE = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
"""The tokens of SentencePiece where the file names none, as in llama.cpp."""
ENDING_MARKUP = "</s>"
"""The end of a text in SentencePiece, which is text like any other in Gemma's and in byte-level vocabularies."""
SPACE = "\u2581"

_ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORDS = rf"(?i:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{0}}"
_SLASHED = _REST.replace("[\\r\\n]*", "[\\r\\n/]*")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_TEKKEN = rf"{_CASED.replace('{0}', '')}|\p{{N}}|{_SLASHED}"
_GPT4O = rf"{_CASED.replace('{0}', f'(?i:{_ENGLISH})?')}|\p{{N}}{{1,3}}|{_SLASHED}"


@attrs.frozen
class Splitting:
    """How a byte-level vocabulary cuts text before its merges.

    Attributes:
        patterns: applied in order; each match is a piece, and so is what is between matches.
        whole: whether a piece that is a token is not merged.
        begins: whether a text begins with the token for it, where the file does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


SPLITTINGS: Mapping[str, Splitting] = {
    "default": Splitting(_DEFAULT),
    **dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2"), Splitting((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), Splitting((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), Splitting((_LLAMA3,), whole=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Splitting((_QWEN2,))),
    "tekken": Splitting((_TEKKEN,), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Splitting((_GPT4O,))),
}
"""By ``tokenizer.ggml.pre``."""


class GgufTokenizer:
    """The vocabulary of a GGUF file.

    Args:
        size: the number of the model's tokens.

    Raises:
        CheckpointError: a key is missing or invalid.
    """

    def __init__(self, metadata: Metadata, path: object, size: int) -> None:
        self._metadata, self._path = metadata, path
        self._tokens = metadata.array("tokenizer.ggml.tokens", str)
        kinds = metadata.array("tokenizer.ggml.token_type", int, [NORMAL] * len(self._tokens))
        if len(kinds) != len(self._tokens) or len(self._tokens) > size:
            raise self._error(f"has {len(self._tokens)} tokens, {len(kinds)} types of tokens and {size} embeddings")
        self._kinds, self._is_gemma = list(kinds), metadata.architecture.startswith("gemma")
        self._model = metadata.text("tokenizer.ggml.model")
        self._endings = self._find_endings()
        self._warn_of_what_is_missing()

    def build(self) -> Tokenizer:
        """Return the tokenizer."""
        builders = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if self._model not in builders:
            raise self._error(
                f"has a tokenizer of the kind {self._model!r:.40}, which hal does not read; {listed(builders)}"
            )
        try:
            tokenizer, begins = builders[self._model]()
            tokenizer.add_tokens(list(self._added()))
        except CheckpointError:
            raise
        except Exception as error:  # The package tokenizers raises plain Exception.
            raise self._error(f"has a damaged tokenizer: {error}") from None
        self._surround(tokenizer, begins)
        return tokenizer

    def config(self) -> dict[str, Any]:
        """Return what tokenizer_config.json has: the special tokens, and the chat templates."""
        metadata = self._metadata
        found: dict[str, Any] = {}
        for name, key in NAMED.items():
            if (index := self._token(key)) is not None:
                found[name] = self._tokens[index]
        templates = {}
        if "tokenizer.chat_template" in metadata:
            templates["default"] = metadata.text("tokenizer.chat_template")
        for name in metadata.array("tokenizer.chat_templates", str, []):
            if (key := f"tokenizer.chat_template.{name}") in metadata:
                templates[name] = metadata.text(key)
        if templates:
            found["chat_template"] = [{"name": name, "template": each} for name, each in templates.items()]
        return found

    def endings(self) -> list[int]:
        """Return the tokens that end a text or a turn: those that the file names, and those with a known name."""
        return sorted(self._endings)

    def _find_endings(self) -> set[int]:
        """Return :meth:`endings`. A token with a known name becomes a control token, as in llama.cpp."""
        ambiguous = self._is_gemma or self._model != "llama"
        found = {index for key in ENDING_KEYS if (index := self._token(key)) is not None}
        for index, token in enumerate(self._tokens):
            if token not in ENDINGS or (self._kinds[index] != CONTROL and ambiguous and token == ENDING_MARKUP):
                continue
            found.add(index)
            if self._kinds[index] != CONTROL:
                log.warning("%s: %r is no control token, and hal reads it as one: it ends a text", self._path, token)
                self._kinds[index] = CONTROL
        return found

    def _warn_of_what_is_missing(self) -> None:
        """Log what follows from keys that older files lack."""
        missing = {
            "token_type": "no token is special, so that the words of a chat template may be cut",
            "pre": "text is cut by llama.cpp's default before the merges, and a model that was trained with other cuts "
            "answers worse; write the model's into a copy with: gguf-new-metadata --pre-tokenizer NAME",
        }
        if self._model != "gpt2":
            del missing["pre"]
        for key, consequence in missing.items():
            if f"tokenizer.ggml.{key}" not in self._metadata:
                log.warning("%s has no tokenizer.ggml.%s: %s", self._path, key, consequence)
        if not self._endings:
            log.warning("%s names no token that ends a text: give one in stop_token_ids, or a stop text", self._path)

    def _token(self, key: str) -> int | None:
        index = self._metadata.token(f"tokenizer.ggml.{key}")
        if index is None and self._model == "llama" and SENTENCEPIECE.get(key, len(self._tokens)) < len(self._tokens):
            return SENTENCEPIECE[key]
        if index is not None and not 0 <= index < len(self._tokens):
            raise self._error(f"has {key} {index}, and {len(self._tokens)} tokens")
        return index

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        name = self._metadata.text("tokenizer.ggml.pre", "default")
        if name not in SPLITTINGS:
            raise self._error(f"has the pre-tokenizer {name!r:.40}, which hal does not read; {listed(SPLITTINGS)}")
        splitting = SPLITTINGS[name]
        merges = [_pair(each) for each in self._metadata.array("tokenizer.ggml.merges", str)]
        tokenizer = Tokenizer(models.BPE(vocab=self._vocabulary(), merges=merges, ignore_merges=splitting.whole))
        splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splitting.patterns]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, splitting.begins

    def _sentencepiece(self) -> tuple[Tokenizer, bool]:
        if self._is_gemma:  # The file has runs of spaces as such, and the published tokenizer has merges of them.
            self._tokens = [SPACE * len(each) if each and not each.strip(" ") else each for each in self._tokens]
        vocabulary = self._vocabulary()
        if "tokenizer.ggml.merges" in self._metadata:
            merges = [_pair(each) for each in self._metadata.array("tokenizer.ggml.merges", str)]
        else:
            merges = self._merges(vocabulary)
        unknown = self._token("unknown_token_id")
        model = models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        prefix = self._metadata.flag("tokenizer.ggml.add_space_prefix", True)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first" if prefix else "never", split=False
        )
        strip = [decoders.Strip(content=" ", left=1)] if prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return tokenizer, True

    def _vocabulary(self) -> dict[str, int]:
        return {token: index for index, token in reversed(list(enumerate(self._tokens)))}

    def _merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return the merges that a vocabulary without merges implies: a token is made of any two others, best first."""
        scores: Sequence[float] = self._metadata.array("tokenizer.ggml.scores", float)
        if len(scores) != len(self._tokens):
            raise self._error(f"has {len(self._tokens)} tokens and {len(scores)} scores")
        if self._is_gemma:  # whose scores are not in the order of its merges
            scores = [-float(index) for index in range(len(self._tokens))]
        found = []
        for index, token in enumerate(self._tokens):
            if self._kinds[index] in (NORMAL, USER_DEFINED):
                for cut in range(len(token) - 1, 0, -1):
                    pair = token[:cut], token[cut:]
                    if pair[0] in vocabulary and pair[1] in vocabulary:
                        found.append((-scores[index], -cut, pair))
        return list(dict.fromkeys(pair for _, _, pair in sorted(found)))

    def _added(self) -> Iterator[AddedToken]:
        """Yield the tokens that are found in a text before it is cut."""
        for token, kind in zip(self._tokens, self._kinds, strict=True):
            if kind in (CONTROL, USER_DEFINED) and token:
                yield AddedToken(token, normalized=False, special=kind == CONTROL)

    def _surround(self, tokenizer: Tokenizer, begins: bool) -> None:
        """Let texts begin and end with the tokens that the file asks for."""
        sides = []
        for flag, key, default in (("add_bos_token", "bos_token_id", begins), ("add_eos_token", "eos_token_id", False)):
            index, wanted = self._token(key), self._metadata.flag(f"tokenizer.ggml.{flag}", default)
            if wanted and index is None and f"tokenizer.ggml.{flag}" in self._metadata:
                raise self._error(f"has {flag} true, and no {key}")
            sides.append((self._tokens[index], index) if wanted and index is not None else None)
        if any(sides):
            template = [f"{each[0]}:0" if each else "" for each in sides]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=" ".join(filter(None, (template[0], "$A:0", template[1]))),
                special_tokens=list({each for each in sides if each}),
            )

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {problem}", "use the model's safetensors files, or another GGUF file")


def _pair(merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge. A token may have a space, but not begin with one."""
    left, _, right = merge.partition(" ")
    return left, right
