"""From SGLang's arguments to hal's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import hal
from hal.config import load, require
from hal.engines.sglang import PLATFORM
from hal.errors import ConfigError

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType({
    "tp_size": (1,), "pp_size": (1,), "dp_size": (1,), "dcp_size": (1,), "attn_cp_size": (1,),
    "attention_backend": (PLATFORM,), "prefill_attention_backend": (PLATFORM,), "decode_attention_backend": (PLATFORM,),
    "cuda_graph_config": (), "cuda_graph_backend_decode": ("disabled",), "cuda_graph_backend_prefill": ("disabled",),
    "cuda_graph_bs_decode": (), "cuda_graph_bs_prefill": (),
    "cuda_graph_max_bs_decode": (), "cuda_graph_max_bs_prefill": (),
    "load_format": ("auto", "safetensors"), "startup_weight_load_mode": ("serial",), "weight_cache_mode": ("off",),
    "custom_weight_loader": (), "quantization": (), "kv_cache_dtype": ("auto",), "cpu_offload_gb": (),
    "enable_memory_saver": (), "enable_unified_memory": (), "enable_hierarchical_cache": (), "enable_lmcache": (),
    "disaggregation_mode": ("null",), "enable_pdmux": (), "enable_two_batch_overlap": (),
    "speculative_algorithm": (), "dllm_algorithm": (), "enable_lora": (), "lora_paths": (), "is_embedding": (),
    "enable_return_hidden_states": (), "enable_mis": (), "enable_deterministic_inference": (),
})  # fmt: skip
"""The values that hal accepts of arguments which it does not serve, besides None, False, 0 and the empty list."""

TORCH_COMPILE_MAX_BS = 32
"""SGLang's default of ``--torch-compile-max-bs``."""

_INSTEAD = MappingProxyType({
    "attention_backend": "hal computes attention", "cuda_graph": "set compilation in hal's configuration",
    "kv_cache_dtype": "hal's models declare their states", "quantization": "hal reads the checkpoint's own scheme",
    "load_format": "pass a folder with safetensors",
})  # fmt: skip


def check(server_args: Any) -> None:
    """Refuse what hal does not serve.

    Raises:
        ConfigError: an argument of :data:`NEUTRAL` has another value.
    """
    asked = server_args._raw_input  # Before SGLang's own defaults for the host, which name its kernels.
    for name, accepted in NEUTRAL.items():
        if (value := asked[name]) and value not in accepted:
            why = next((each for part, each in _INSTEAD.items() if part in name), "start SGLang without it")
            raise ConfigError(f"hal does not support SGLang's {name} = {value!r:.100}", why)


def configuration(server_args: Any) -> hal.Config:
    """Return hal's configuration: ``hal`` in ``--json-model-override-args``, or the ``HAL_*`` environment variables.

    ``--enable-torch-compile`` selects the compiler ``graph`` if none is configured, and ``--torch-compile-max-bs`` sets
    its ``torch_compile_max_bs``. ``--page-size`` sets ``cache.block_size``.

    Raises:
        ConfigError: the configuration is invalid, or contradicts the arguments.
    """
    table = hal.read_config(json.loads(server_args.json_model_override_args).get("hal"))
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
