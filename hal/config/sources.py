"""Loading of a configuration from a Config, a mapping, text, a file or ``HAL_*`` environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import attrs

from hal.config.compile_cache import CACHE_DIR
from hal.config.reading import read
from hal.config.settings import CONFIGS, Config
from hal.config.text import Digit, kind_of, parse_json, read_file
from hal.errors import ConfigError, UnknownKey, nearest

_KEYS = frozenset(field.name for field in attrs.fields(Config))
OTHERS = frozenset({CACHE_DIR, "HAL_VLLM", "HAL_API_KEY"})
"""Variables that are not keys: the folder of caches, the switch of an engine, and the key of ``hal serve``."""


def environment_mapping(environ: Mapping[str, str] | None = None, driver_names: Iterable[str] = ()) -> dict[str, Any]:
    """Read ``HAL_*`` variables into a mapping; ``HAL_CACHE__NUM_TOKENS`` sets ``num_tokens`` of the table ``cache``.

    A value is parsed as JSON if possible (``HAL_STRICT=true``), else it is a string. Where true or false is expected, 1
    and 0 are the same. :func:`environment_options` reads ``HAL_<DRIVER>_*``, and :func:`cache_folder` reads
    ``HAL_CACHE_DIR``. :func:`read` rejects unknown keys of tables.

    Raises:
        ConfigError: a variable is unknown, or two set the same key.
    """
    environ = os.environ if environ is None else environ
    drivers = tuple(driver_names)
    mapping: dict[str, Any] = {}
    wholes: set[tuple[str, ...]] = set()
    for variable, text in sorted(environ.items()):
        if not variable.startswith("HAL_") or variable in OTHERS:
            continue
        if any(_option_of(variable, driver) for driver in drivers):
            continue
        path = variable.removeprefix("HAL_").lower().split("__")
        if path[0] not in _KEYS:
            names = {*OTHERS, *(f"HAL_{key.upper()}" for key in _KEYS)}
            raise UnknownKey(
                f"hal reads no environment variable {variable} ({nearest(variable, names)})",
                "correct or unset it; drivers that are installed add HAL_DRIVER_OPTION",
                key=variable,
            )
        table = mapping
        for depth, key in enumerate(path[:-1], start=1):
            if tuple(path[:depth]) in wholes:
                raise ConfigError(f"{variable} sets a key of {key}, which another variable sets whole", "unset one")
            table = table.setdefault(key, {})
        if path[-1] in table:  # The names differ in case, or a lower-case name sorts after the keys of its table.
            raise ConfigError(f"{variable} sets {'.'.join(path)}, which another variable sets too", "unset one")
        table[path[-1]] = _environment_value(path, text, variable)
        wholes.add(tuple(path))
    return mapping


def environment_options(driver_name: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a driver's options from ``HAL_<DRIVER>_<OPTION>``: ``HAL_ACME_CARDS=2`` gives ``{"cards": 2}``."""
    environ = os.environ if environ is None else environ
    variables = environment_variables(driver_name, environ)
    return {
        option: _environment_value(["options", option], environ[variable], variable)
        for option, variable in variables.items()
    }


def environment_variables(driver_name: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that :func:`environment_options` reads for a driver, by option."""
    environ = os.environ if environ is None else environ
    options = ((_option_of(variable, driver_name), variable) for variable in sorted(environ))
    return {option: variable for option, variable in options if option}


def _option_of(variable: str, driver_name: str) -> str:
    """Return the driver's option that a variable sets, or ``""``. Two underscores separate the tables of Config."""
    if variable == CACHE_DIR:
        return ""
    option = variable.removeprefix(f"HAL_{driver_name.upper().replace('-', '_')}_")
    return option.lower() if option != variable and not option.startswith("_") else ""


def _environment_value(path: list[str], text: str, variable: str) -> Any:
    cls: Any = Config
    for key in path:
        cls = get_type_hints(cls).get(key) if attrs.has(cls) else None
    if cls is str or get_origin(cls) is Literal:
        return text
    if text in ("0", "1"):
        return text == "1" if cls is bool else Digit(text)
    if text.lstrip().startswith("{"):
        return parse_json(text, variable)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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
    if not isinstance(value, CONFIGS):
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
