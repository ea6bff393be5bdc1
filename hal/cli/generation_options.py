"""The options of prompts, sampling and chat templates, which several commands share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import attrs
import click

from hal.config.bounds import NO_SEED
from hal.errors import BatchError, ConfigError
from hal.generation.sampling_params import OPTIONS, SamplingParams

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint


P = TypeVar("P", bound=Sized)
PROMPT = "A prompt, used verbatim. Repeatable."
PROMPTS_FILE = "A UTF-8 file with one prompt per line, used verbatim, after those of --prompt. - reads stdin."
STDIN = "<stdin>"
"""Python's name of the file."""


@attrs.frozen
class Prompts:
    """The prompts of a command, in order.

    Attributes:
        origins: where each comes from, as the subject of an error.
    """

    texts: list[str]
    origins: list[str]
    stdin: bytes | None

    @classmethod
    def read(cls, options: Sequence[str], file: BinaryIO | None) -> Prompts:
        """Return the prompts of ``--prompt`` and of ``--prompts-file``.

        Raises:
            UsageError: there are none.
            BatchError: one is not valid Unicode.
        """
        texts, origins, stdin = list(options), [f"prompt {index}" for index in range(len(options))], None
        if file is not None:
            content, name = file.read(), getattr(file, "name", STDIN)
            lines = _lines(content, name)
            texts += lines
            origins += [
                f"{name}, line {number}: prompt {len(options) + number - 1}" for number in range(1, len(lines) + 1)
            ]
            stdin = content if name == STDIN else None
        if not texts:
            raise click.UsageError("No prompt given: use --prompt, or --prompts-file with at least one line.")
        for text, origin in zip(texts, origins, strict=True):
            if any("\ud800" <= character <= "\udfff" for character in text):  # Python's encoding of invalid UTF-8
                raise BatchError(f"{origin} is not valid Unicode: {text!r:.70}", "give it in UTF-8")
        return cls(texts, origins, stdin)

    def encode(self, encode: Callable[[str], P]) -> list[P]:
        """Return the prompts that ``encode`` makes of the texts.

        Raises:
            BatchError: a prompt has no tokens.
        """
        encoded = list(map(encode, self.texts))
        for each, origin in zip(encoded, self.origins, strict=True):
            if not len(each):
                raise BatchError(f"{origin} is empty", "remove it, or write at least one character")
        return encoded


def _lines(content: bytes, name: str) -> list[str]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BatchError(f"{name}, line {line} is not UTF-8: {error}", "save it as UTF-8") from None
    # Not splitlines: it also splits at form feeds and other characters that a prompt may contain.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


GREEDY = "Select the most likely token, whatever the checkpoint recommends."
STOP = "Ends the text, which is cut before it. Repeatable."
JSON_SCHEMA = "A JSON schema that the text follows, or a file with one. Needs the extra torch-hal[grammars]."
REGEX = "A regular expression that the whole text matches. Needs the extra torch-hal[grammars]."
REVISION = "The branch, tag or commit of a model of the hub."
SWITCH = "A variable of the chat template, such as enable_thinking=false. VALUE is JSON, or else a text. Repeatable."
TOOLS = "A JSON file with a list of the functions that the model may call, for the chat template."


def sampling_options(seed: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options to a command, which gets them as one argument ``sampling``: those given, by name."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_sampling(
            *args: Any, greedy: bool, stop: Sequence[str], json_schema: str | None, regex: str | None, **given: Any
        ) -> Any:
            names = (*OPTIONS, "seed")
            sampling = {name: value for name in names if (value := given.pop(name)) is not None}
            if greedy and sampling.setdefault("temperature", 0.0) != 0:
                raise click.UsageError(f"--greedy and --temperature {sampling['temperature']:g} exclude each other.")
            if sampling.get("seed") == NO_SEED:
                del sampling["seed"]
            if stop:
                sampling["stop"] = stop
            if json_schema is not None:
                sampling["json_schema"] = _schema(json_schema)
            if regex is not None:
                sampling["regex"] = regex
            return command(*args, sampling=sampling, **given)

        found: Callable[..., Any] = with_sampling
        found = click.option("--regex", metavar="REGEX", help=REGEX)(found)
        found = click.option("--json-schema", metavar="JSON", help=JSON_SCHEMA)(found)
        found = click.option("--stop", multiple=True, metavar="TEXT", help=STOP)(found)
        found = click.option("--greedy", is_flag=True, help=GREEDY)(found)
        found = click.option("--seed", type=int, help=seed)(found)
        for name, text in reversed(OPTIONS.items()):
            option, kind = f"--{name.replace('_', '-')}", type(getattr(attrs.fields(SamplingParams), name).default)
            found = click.option(option, type=kind, help=f"{text} By default, as the checkpoint recommends.")(found)
        return found

    return decorate


DRAFT = (
    "Draft tokens, which the model verifies some at a time: ngram, mtp, or a smaller checkpoint of the same "
    "vocabulary. The texts are the same."
)
DRAFT_TOKENS = "The most drafted tokens of a text in a step. By default, 4."


def draft_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of drafts to a command, which gets them as one argument ``draft``; None without a drafter."""

    @functools.wraps(command)
    def with_draft(*args: Any, draft: str | None, draft_tokens: int | None, **given: Any) -> Any:
        if draft is None:
            if draft_tokens is not None:
                raise click.UsageError("--draft-tokens needs --draft.")
            return command(*args, draft=None, **given)
        from hal.generation.drafting.drafter import DraftConfig

        found = DraftConfig.of(draft)
        return command(
            *args, draft=found if draft_tokens is None else attrs.evolve(found, tokens=draft_tokens), **given
        )

    found: Callable[..., Any] = with_draft
    found = click.option("--draft-tokens", type=click.IntRange(1), metavar="N", help=DRAFT_TOKENS)(found)
    return click.option("--draft", metavar="NAME", help=DRAFT)(found)


def _schema(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--json-schema {given!r:.70} is neither a JSON object nor a file: {error}") from None


def params_of(checkpoint: Checkpoint, sampling: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that the options give, with the checkpoint's for the others."""
    from hal.generation.llm.checkpoint_defaults import merged, recommended

    return merged(recommended(checkpoint), checkpoint.stop_token_ids, sampling, seed=0)


def switches_of(options: Sequence[str]) -> dict[str, Any]:
    """Return the variables that ``NAME=VALUE`` options set.

    Raises:
        ConfigError: one is written otherwise, or sets a variable again.
    """
    from hal.generation.llm.chat_template import ARGUMENTS

    found: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier() or name in (*ARGUMENTS, *found):
            raise ConfigError(f"--switch is {option!r:.70}", "give each variable once, as NAME=VALUE")
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError):
            found[name] = text
    return found


def tools_of(file: Path | None) -> list[dict[str, Any]] | None:
    """Return the tools in a file; None if there is none.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    if file is None:
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "give a JSON file") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{file} is no list of JSON objects", "give the functions as OpenAI's API writes tools")
    return found
