"""Reconciliation of an engine's own options with hal's configuration."""

from __future__ import annotations

from typing import Any

from hal.errors import ConfigError


def require(config: dict[str, Any], key: str, value: Any, option: str) -> None:
    """Set a key of a configuration to the value that an engine's option requires.

    Args:
        config: as :func:`hal.read_config` returns it; changed in place.
        key: with the names of its tables, such as ``cache.block_size``.
        value: the value that the option stands for.
        option: the engine's name of the option, such as ``vLLM's block_size``.

    Raises:
        ConfigError: the configuration has another value than ``value``, None and ``auto``.
    """
    table, (*names, last) = config, key.split(".")
    for name in names:
        table = table.setdefault(name, {})
    if table.get(last) in (None, "auto"):
        table[last] = value
    elif table[last] != value:
        raise ConfigError(
            f"{option} requires {key} = {value!r}, and hal's configuration has {key} = {table[last]!r}",
            f"leave {key} out of hal's configuration",
        )
