"""The options of chat templates: switches, and the tools that a model may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal.errors import ConfigError

SWITCH = "A variable of the chat template, such as enable_thinking=false. VALUE is JSON, or else a text. Repeatable."
TOOLS = "A JSON file with a list of the functions that the model may call, for the chat template."


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
