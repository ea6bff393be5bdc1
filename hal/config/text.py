"""Parsing of JSON and TOML into mappings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hal.errors import ConfigError


class Digit(int):
    """0 or 1 in an environment variable, which a key that is true or false reads as such."""


def read_file(path: Path) -> Mapping[str, Any]:
    """Parse a ``.json`` or ``.toml`` file into a mapping; any other file raises ConfigError."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".toml"):
        raise ConfigError(f"the config file {path} is neither .json nor .toml", "convert it to .json or .toml")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error}", "check the path and its permissions"
        ) from None
    if suffix == ".json":
        return parse_json(text, str(path))
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "correct the file") from None


def parse_json(text: str, where: str) -> Mapping[str, Any]:
    """Parse a JSON object. A duplicate key raises ConfigError, because json would silently drop one value."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"duplicate keys: {', '.join(twice)}")
        return table

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}", "correct the text") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {kind_of(value)}", "write it as {...}")
    return value


def kind_of(value: Any) -> str:
    """Return the type and the value, for errors."""
    if value is None:
        return "null"
    try:
        return f"{'int' if type(value) is Digit else type(value).__name__} {value!r:.60}"
    except ValueError:  # An integer may have more digits than Python converts to a string.
        return type(value).__name__
