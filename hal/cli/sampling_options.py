"""The options of sampling and of chat templates, which several commands share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from hal.config.bounds import NO_SEED
from hal.errors import ConfigError
from hal.generation.sampling_params import OPTIONS, SamplingParams

if TYPE_CHECKING:
    from hal.checkpoint.checkpoint import Checkpoint


GREEDY = "Select the most likely token, whatever the checkpoint recommends."
STOP = "Ends the text, which is cut before it. Repeatable."
JSON_SCHEMA = "A JSON schema that the text follows, or a file with one. Needs the extra torch-hal[grammars]."
REGEX = "A regular expression that the whole text matches. Needs the extra torch-hal[grammars]."
REVISION = "The branch, tag or commit of a model of the hub."
SWITCH = "A variable of the chat template, such as enable_thinking=false. VALUE is JSON, or else a text. Repeatable."
TOOLS = "A JSON file with a list of the functions that the model may call, for the chat template."


def sampling_options(seed: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options to a command, which gets them as one argument ``sampling``: those given, by name.

    Args:
        seed: the help of ``--seed``.
    """

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
