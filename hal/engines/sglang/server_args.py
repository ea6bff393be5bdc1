"""From SGLang's arguments to hal's configuration, and which models hal runs inside SGLang."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import hal
from hal.checkpoint.loading import build_model
from hal.config import load, require
from hal.engines.sglang import PLATFORM
from hal.errors import ConfigError, ModelError
from hal.step import SEQUENCE, TOKEN

SERVED_BY: Mapping[str, Sequence[str]] = tomllib.loads(
    (files(__package__) / "served_arguments.toml").read_text(encoding="utf-8")
)
"""The arguments of SGLang that have an effect under hal, by who reads them. All others are refused."""
SERVED = frozenset[str]().union(*SERVED_BY.values())
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "device": ("cpu",),
        "model_impl": ("sglang",),
        "load_format": ("safetensors",),
        "attention_backend": (PLATFORM,),
        "prefill_attention_backend": (PLATFORM,),
        "decode_attention_backend": (PLATFORM,),
        "cuda_graph_backend_decode": ("disabled",),
        "cuda_graph_backend_prefill": ("disabled",),
    }
)
"""The values that hal accepts of other arguments, besides their defaults. They state what hal does anyway."""

TORCH_COMPILE_MAX_BS = 32
"""SGLang's default of ``--torch-compile-max-bs``."""

_INSTEAD = MappingProxyType(
    {
        "attention_backend": "hal computes attention",
        "cuda_graph": "set compilation in hal's configuration",
        "kv_cache_dtype": "hal's models declare their states",
        "quantization": "hal reads the checkpoint's own scheme",
        "load_format": "pass a folder with safetensors",
    }
)
_OTHERWISE = "run the model with hal.LLM or `hal serve`"


def check(server_args: Any) -> None:
    """Refuse the arguments of what hal replaces: SGLang's models, kernels, caches and graphs.

    Raises:
        ConfigError: an argument that is not in ``SERVED`` has neither its default nor a value of :data:`NEUTRAL`.
    """
    from sglang.srt.server_args import ServerArgs  # imports this module

    asked = server_args._raw_input  # Before SGLang's own defaults for the host, which name its kernels.
    plain = ServerArgs(model_path=server_args.model_path)
    for name, value in asked.items():
        default = getattr(plain, name)
        if name in SERVED or name.startswith("_") or value == default or not (value or default):
            continue
        if value not in NEUTRAL.get(name, ()):
            why = next((each for part, each in _INSTEAD.items() if part in name), "start SGLang without it")
            raise ConfigError(f"hal does not support SGLang's {name} = {value!r:.100}", why)


def configuration(server_args: Any) -> hal.Config:
    """Return hal's configuration: ``hal`` in ``--json-model-override-args``, or the ``HAL_*`` environment variables.

    ``--enable-torch-compile`` selects the compiler ``graph`` if none is configured, and ``--torch-compile-max-bs`` sets
    its ``torch_compile_max_bs``. ``--page-size`` sets ``cache.block_size``.

    Raises:
        ConfigError: the configuration is invalid, or contradicts the arguments, or ``--json-model-override-args`` has
            other keys.
    """
    overrides = json.loads(server_args.json_model_override_args)
    if others := sorted(overrides.keys() - {"hal"}):
        raise ConfigError(
            f"hal does not read {', '.join(others)} in SGLang's json_model_override_args, only hal",
            "change the checkpoint's config.json, which hal reads",
        )
    table = hal.read_config(overrides.get("hal"))
    largest = server_args.torch_compile_max_bs
    if server_args.enable_torch_compile:
        table["compilation"] = _compiled(table.get("compilation", {}), largest)
    elif largest != TORCH_COMPILE_MAX_BS:
        raise ConfigError(f"SGLang's torch_compile_max_bs is {largest}", "pass --enable-torch-compile, too")
    if (size := server_args.page_size) is not None:
        require(table, "cache.block_size", size, "SGLang's page_size")
    return load(table)


def _compiled(table: dict[str, Any], largest: int) -> dict[str, Any]:
    if table.setdefault("compiler", "graph") == "eager":
        raise ConfigError("enable_torch_compile is set, and hal's compiler is eager", "leave one of them out")
    if table["compiler"] == "graph" or largest != TORCH_COMPILE_MAX_BS:
        table.setdefault("torch_compile_max_bs", largest)
    return table


def check_checkpoint(path: str, config: hal.Config) -> None:
    """Check the model of a folder, without its weights and before SGLang starts its processes.

    Args:
        path: SGLang's ``--model-path``.

    Raises:
        CheckpointError: as :func:`hal.load_model`.
        ModelError: as :func:`check_model`.
    """
    if os.path.isdir(path):
        checkpoint = hal.Checkpoint.open(path)
        check_model(build_model(checkpoint, source=config.model_source, cache_dtype=config.cache.dtype))


def check_model(model: hal.nn.CausalLM) -> None:
    """Check that SGLang's cache fits a model.

    Raises:
        ModelError: the model generates no text, or a layer keeps anything but a key and a value per token.
    """
    name = type(model).__name__
    if not model.causal:
        raise ModelError(f"{name} attends to later tokens, so it generates no text", "use hal.LLM.embed")
    for index, states in enumerate(model.states):
        first, *others = states.values()
        if any(each.per is SEQUENCE for each in states.values()):
            raise ModelError(
                f"layer {index} of {name} keeps states per sequence, whose pool SGLang's platforms cannot replace",
                _OTHERWISE,
            )
        if first.per is not TOKEN or len(first.shape) != 2 or others != [first]:
            raise ModelError(
                f"layer {index} keeps {dict(states)!s:.200}; hal inside SGLang supports a key and a value per token",
                _OTHERWISE,
            )
