"""Loading of a configuration from a Config, a mapping, text, a file or the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from hal.config.environment import environment_mapping
from hal.config.reading import read
from hal.config.settings import (
    CacheConfig,
    CompilationConfig,
    Config,
    EncoderConfig,
    ParallelConfig,
    PhaseConfig,
)
from hal.config.text import kind_of, parse_json, read_file
from hal.errors import ConfigError

Source = Config | Mapping[str, Any] | str | os.PathLike[str] | None


def load(source: Source = None, *, driver_names: Iterable[str] = ()) -> Config:
    """Return the :class:`Config` that ``source`` describes.

    Args:
        source: a Config (which is validated), a mapping, JSON text (starts with ``{``), a path ending in ``.json`` or
            ``.toml``, a backend's name, or None for the ``HAL_*`` environment variables. A string with a slash or a
            suffix is a path.
        driver_names: drivers whose ``HAL_<DRIVER>_*`` variables are skipped if source is None.

    Raises:
        ConfigError: the source cannot be read or holds an unknown key or an invalid value.
    """
    if source is None:
        return read(Config, environment_mapping(driver_names=driver_names), "environment")
    return read(Config, to_mapping(source), str(source) if _is_path(source) else "config")


def _table(value: Any) -> Any:
    """Return a Config as a mapping. Unlike attrs.asdict, it keeps the driver's options as objects."""
    if not isinstance(value, (Config, CompilationConfig, PhaseConfig, EncoderConfig, CacheConfig, ParallelConfig)):
        return value
    return {field.name: _table(getattr(value, field.name)) for field in attrs.fields(type(value))}


def to_mapping(source: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the mapping that a source of :func:`load` describes. The environment is no such source."""
    if isinstance(source, Config):
        table: Mapping[str, Any] = _table(source)
        return table
    if isinstance(source, Mapping):
        return source
    if _is_path(source):
        return read_file(Path(source))
    if not isinstance(source, str):
        raise ConfigError(f"cannot read a config from {kind_of(source)}", "pass a mapping, JSON text, a path or a name")
    return parse_json(source, "config text") if _is_json(source) else {"backend": source}


def _is_path(source: Any) -> bool:
    if not isinstance(source, str):
        return isinstance(source, os.PathLike)
    return not _is_json(source) and ("/" in source or os.sep in source or bool(Path(source).suffix))


def _is_json(source: str) -> bool:
    return source.lstrip().startswith("{")


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
