"""Options that several commands share to set the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hal.errors import ConfigError

COMPILATION_CONFIG = "Keys of the table `compilation`, as a JSON object or a path ending in .json or .toml."
COMPILER = "eager, graph, piecewise, or a compiler of the driver."
MODEL_SOURCE = "Where the model's code comes from: auto, hal, or another source, such as transformers."


def settings_of(
    backend: str | None,
    dtype: str | None,
    compiler: str | None,
    compilation_config: str | None,
    model_source: str | None = None,
) -> dict[str, Any]:
    """Return the environment's configuration, overridden by the options."""
    from hal.config import CompilationConfig, read
    from hal.drivers.registry import read_config

    settings = read_config()
    given = {"backend": backend, "dtype": dtype, "model_source": model_source}
    options = {name: value for name, value in given.items() if value is not None}
    compilation = {} if compilation_config is None else dict(compilation_of(compilation_config))
    read(CompilationConfig, compilation, "--compilation-config")
    if compiler is not None and compilation.setdefault("compiler", compiler) != compiler:
        raise ConfigError(
            f"--compiler is {compiler}, but --compilation-config sets {compilation['compiler']}", "remove one of them"
        )
    return {**settings, **options, "compilation": {**settings.get("compilation", {}), **compilation}}


def compilation_of(source: str) -> Mapping[str, Any]:
    """Return the keys that ``--compilation-config`` sets.

    Raises:
        ConfigError: the value is neither JSON nor a readable file.
    """
    from hal.config import parse_json, read_file

    if source.lstrip().startswith("{"):
        return parse_json(source, "--compilation-config")
    if source.endswith((".json", ".toml")):
        return read_file(Path(source))
    raise ConfigError(
        f"--compilation-config is {source!r:.70}, neither a JSON object nor a path ending in .json or .toml",
        "write it as {...}, or give such a path",
    )
