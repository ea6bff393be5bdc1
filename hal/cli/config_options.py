"""What the options of several commands say about the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hal.errors import ConfigError

COMPILATION_CONFIG = "Keys of the table `compilation`: a JSON object, or a path ending in .json or .toml."
COMPILER = "eager, graph, piecewise, or one that the driver brings."


def settings_of(
    backend: str | None, dtype: str | None, compiler: str | None, compilation_config: str | None
) -> dict[str, Any]:
    """The environment's configuration, and over it what the options say."""
    from hal.config import CompilationConfig, Config, environment_mapping, read
    from hal.drivers.registry import driver_names

    settings = environment_mapping(driver_names=driver_names())
    read(Config, settings, "environment")  # so that an error in it is not blamed on an option
    options = {name: value for name, value in (("backend", backend), ("dtype", dtype)) if value is not None}
    compilation = {} if compilation_config is None else dict(compilation_of(compilation_config))
    read(CompilationConfig, compilation, "--compilation-config")
    if compiler is not None and compilation.setdefault("compiler", compiler) != compiler:
        raise ConfigError(
            f"--compiler says {compiler}, and --compilation-config {compilation['compiler']}", "leave one of them out"
        )
    return {**settings, **options, "compilation": {**settings.get("compilation", {}), **compilation}}


def compilation_of(source: str) -> Mapping[str, Any]:
    """The keys that ``--compilation-config`` gives.

    Raises:
        ConfigError: it is neither JSON nor a file that can be read.
    """
    from hal.config import parse_json, read_file

    if source.lstrip().startswith("{"):
        return parse_json(source, "--compilation-config")
    if source.endswith((".json", ".toml")):
        return read_file(Path(source))
    raise ConfigError(
        f"--compilation-config is {source!r:.70}, neither JSON nor a file that can be read",
        "write it as {...}, or give a path ending in .json or .toml",
    )
