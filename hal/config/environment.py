"""Reading of ``HAL_*`` environment variables, for the configuration and for drivers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_origin, get_type_hints

import attrs

from hal.config.compile_cache import CACHE_DIR
from hal.config.settings import Config
from hal.config.text import Digit, parse_json
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
