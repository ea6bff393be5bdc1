"""A checkpoint's tokenizer: tokenizer.json, with what version 5 of transformers takes from the files beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from hal.config.untrusted_files import AGAIN, is_there, read_json, regular_file
from hal.errors import CheckpointError

log = logging.getLogger("hal.checkpoint")

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name, which chat templates read as variables."""
_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"
_OTHER_CLASS = frozenset({"mistral", "mixtral"})
"""Values of model_type whose LlamaTokenizer transformers 5 reads from tokenizer.json alone."""
ENDINGS = (
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<turn|>"),
    *("<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"),
)
"""Tokens that end a text or a turn, by their published names, whether or not a checkpoint names them."""
_FLAGS = frozenset({"single_word", "lstrip", "rstrip", "normalized", "special"})


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint's folder.

    As in version 5 of transformers, special and added tokens may also be declared in tokenizer_config.json,
    special_tokens_map.json and added_tokens.json, and tokenizer.json alone says which tokens begin and end a text. A
    flag of tokenizer_config.json that earlier versions follow, and that says otherwise, logs a warning.

    Raises:
        CheckpointError: tokenizer.json is missing, or a file is damaged.
    """
    file = folder / TOKENIZER
    if not is_there(file):
        raise CheckpointError(f"{folder} has no {TOKENIZER}", "save the fast tokenizer beside the weights")
    regular_file(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # The package tokenizers raises plain Exception.
        raise CheckpointError(f"{file} is not a tokenizer: {error}", AGAIN) from None
    # Some files hold settings of the training. A prompt must be neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _optional(folder / CONFIG)
    replaced = _rebuild_llama(tokenizer, config, _optional(folder / "config.json"))
    named = {key: config.get(key) for key in NAMED}
    try:
        _add_tokens(tokenizer, folder, config, named)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the special tokens beside {file} cannot be read: {error}", AGAIN) from None
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    for problem in (*replaced, *_differences(tokenizer, config, named)):
        log.warning("%s in %s: %s", CONFIG, folder, problem)
    return tokenizer


def _rebuild_llama(tokenizer: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """Do what transformers 5 does for LlamaTokenizer: build all but the vocabulary and the template from the class.

    Args:
        tokenizer: changed in place.
        config: tokenizer_config.json.
        model: config.json.

    Returns:
        A warning if this changes the tokenizer.
    """
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    if str(name).removesuffix("Fast") != "LlamaTokenizer" or model.get("model_type") in _OTHER_CLASS:
        return []
    before = json.loads(tokenizer.to_str())
    if before["model"]["type"] != "BPE" or '"ByteLevel"' in json.dumps([before["pre_tokenizer"], before["decoder"]]):
        return []
    prefix = config.get("add_prefix_space")
    scheme = "never" if prefix is False else "always" if config.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    strip = [] if prefix is False else [decoders.Strip(content=" ", left=1)]
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.model.fuse_unk = tokenizer.model.byte_fallback = True
    after = json.loads(tokenizer.to_str())
    if all(before[key] == after[key] for key in ("normalizer", "pre_tokenizer")):
        return []
    return [
        f"tokenizer_class is {name}: as in version 5 of transformers, its normalizer and pre-tokenizer replace those "
        f"of {TOKENIZER}, which earlier versions follow; set it to PreTrainedTokenizerFast to follow {TOKENIZER}"
    ]


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if is_there(file) else {}


def _add_tokens(tokenizer: Tokenizer, folder: Path, config: Mapping[str, Any], named: dict[str, Any]) -> None:
    """Add the tokens that are declared beside tokenizer.json, in transformers' order, which numbers new ones.

    Args:
        tokenizer: changed in place.
        config: tokenizer_config.json.
        named: the named special tokens of it; those of special_tokens_map.json replace them.
    """
    values, declared = dict(config), dict[int, AddedToken]()
    if _OLDER_EXTRA in values and not values.get(_EXTRA):
        values[_EXTRA] = values.pop(_OLDER_EXTRA)
    tables = [values.pop(_EXTRA)] if isinstance(values.get(_EXTRA), dict) else []
    if "added_tokens_decoder" in config:
        declared = {int(index): _token(each) for index, each in config["added_tokens_decoder"].items()}
    else:  # The layout of older versions
        found = _optional(folder / _SPECIAL_MAP)
        if isinstance(found.get(_EXTRA), dict):
            tables.append(found.pop(_EXTRA))
        elif _EXTRA in found:
            found[_EXTRA] = [*(values.get(_EXTRA) or []), *found[_EXTRA]]
        values |= found
        named |= {key: found[key] for key in NAMED if key in found}
        special = {_text(each) for each in (*named.values(), *(values.get(_EXTRA) or [])) if each}
        for text, index in _optional(folder / _ADDED).items():
            declared[index] = AddedToken(text, normalized=text not in special, special=text in special)
        declared |= tokenizer.get_added_tokens_decoder()
    extra = values.get(_EXTRA, values.get(_OLDER_EXTRA)) or []
    others = {key: each for key, each in values.items() if key.endswith("_token") and key not in NAMED}
    others = {key: each for key, each in others.items() if _is_token(each)}
    for table in tables:
        others |= table
    specials = [each if isinstance(each, str) else _token(each) for each in (*named.values(), *others.values()) if each]
    tokens: list[AddedToken | str] = [declared[index] for index in sorted(declared)]
    known = {*map(_content, tokens), *map(_content, tokenizer.get_added_tokens_decoder().values())}
    # Of two tokens with one text, the last one's flags are valid, so that both are added.
    for each in (*specials, *(each if isinstance(each, str) else _token(each, special=True) for each in extra)):
        if _content(each) not in known and each not in tokens:
            tokens.append(each)
    names = set(map(_content, specials))
    for place, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[place] = AddedToken(token, special=True)
        else:
            token.special = token.special or token.content in names
    tokenizer.add_tokens(tokens)


def _content(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else token.content


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _text(value: Any) -> str:
    """Return the text of a token, which is text or an object with a ``content``.

    Raises:
        TypeError: it is neither.
    """
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TypeError(f"{value!r:.60} is no token")
    return text


def _token(value: Any, **flags: bool) -> AddedToken:
    given = {key: value[key] for key in _FLAGS & value.keys()} if isinstance(value, dict) else {}
    return AddedToken(_text(value), **{**given, **flags})


def _differences(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, Any]) -> Iterator[str]:
    """Yield how settings that versions of transformers read differently differ from the tokenizer."""
    around = tokenizer.encode("").ids
    for key, name, place, where in (
        ("add_bos_token", "bos_token", 0, "begins"),
        ("add_eos_token", "eos_token", -1, "ends"),
    ):
        token = named[name] and _text(named[name])
        adds = bool(around) and token is not None and around[place] == tokenizer.token_to_id(token)
        if isinstance(config.get(key), bool) and token is not None and config[key] != adds:
            yield (
                f"{key} is {str(config[key]).lower()}, but with {TOKENIZER} {'every' if adds else 'no'} text {where} "
                f"with {token!r:.40}; hal and version 5 of transformers follow {TOKENIZER}, and earlier versions may "
                "follow the flag"
            )
    pre_tokenizer = tokenizer.pre_tokenizer
    prefix = getattr(pre_tokenizer, "add_prefix_space", None)
    if isinstance(config.get("add_prefix_space"), bool) and prefix not in (None, config["add_prefix_space"]):
        yield (
            f"add_prefix_space is {str(config['add_prefix_space']).lower()}, but {str(prefix).lower()} in {TOKENIZER}, "
            "which hal follows; versions of transformers differ"
        )
    if config.get("clean_up_tokenization_spaces") is True and type(tokenizer.model).__name__ != "BPE":
        yield (
            "clean_up_tokenization_spaces is true: transformers removes spaces before punctuation from generated "
            "texts, and hal does not"
        )
