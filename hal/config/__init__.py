"""Configuration: frozen attrs classes, read from a mapping, JSON or TOML text, a file, or ``HAL_*`` variables.

Reading is strict. An unknown key, a wrong type or a duplicate key is a :class:`ConfigError` that names the key and the
nearest known one. Drivers and models read their options with :func:`read` too.
"""

from __future__ import annotations

from hal.config.compile_cache import (
    CACHE_DIR,
    CompileCache,
    cache_folder,
    content_key,
    home_of,
    private_folder,
)
from hal.config.cxx_compiler import compiler_key, cxx_compiler
from hal.config.reading import read, read_model_config
from hal.config.settings import (
    AdaptersConfig,
    CacheConfig,
    CompilationConfig,
    Config,
    DTypeName,
    EncoderConfig,
    NumericsConfig,
    ParallelConfig,
    PhaseConfig,
)
from hal.config.sources import (
    Source,
    environment_mapping,
    environment_options,
    environment_variables,
    load,
    require,
    to_mapping,
)
from hal.config.text import parse_json, read_file

__all__ = [
    "CACHE_DIR",
    "AdaptersConfig",
    "CacheConfig",
    "CompilationConfig",
    "CompileCache",
    "Config",
    "DTypeName",
    "EncoderConfig",
    "NumericsConfig",
    "ParallelConfig",
    "PhaseConfig",
    "Source",
    "cache_folder",
    "compiler_key",
    "content_key",
    "cxx_compiler",
    "environment_mapping",
    "environment_options",
    "environment_variables",
    "home_of",
    "load",
    "parse_json",
    "private_folder",
    "read",
    "read_file",
    "read_model_config",
    "require",
    "to_mapping",
]
