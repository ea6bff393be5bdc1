"""What of vLLM's configuration is hal's, and what hal refuses of the rest."""

from __future__ import annotations

from typing import Any

import hal
from hal.errors import ConfigError

PARTS = {
    "speculative_config": "speculative decoding", "lora_config": "LoRA", "kv_transfer_config": "KV connectors",
    "ec_transfer_config": "encoder connectors",
}  # fmt: skip
"""Parts of the configuration, by name, and their features."""
SIZES = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
"""Numbers of ranks that must be 1."""
LOCAL_RANKS = "hal_local_ranks"
"""The key of ``additional_config`` that has the number of ranks on this machine."""


def hal_config(vllm_config: Any) -> dict[str, Any]:
    """Return hal's configuration: ``hal`` in vLLM's ``additional_config``, or else the ``HAL_*`` variables."""
    return hal.read_config((vllm_config.additional_config or {}).get("hal"))


def check_config(vllm_config: Any) -> None:
    """Check vLLM's configuration.

    Raises:
        ConfigError: it asks for what hal does not support, or hal's own configuration has a size that vLLM decides.
    """
    for name, feature in PARTS.items():
        if getattr(vllm_config, name, None) is not None:
            raise ConfigError(f"hal does not support vLLM's {name}", f"start vLLM without {feature}")
    parallel = vllm_config.parallel_config
    for name in SIZES:
        if (size := getattr(parallel, name)) > 1:
            raise ConfigError(f"hal does not support vLLM's {name} = {size}", "leave it at 1")
    if parallel.enable_expert_parallel:
        raise ConfigError(
            "hal does not read vLLM's enable_expert_parallel",
            "leave it out, and set parallel.experts in hal's configuration, such as to all_to_all",
        )
    asked = hal_config(vllm_config).get("parallel", {})
    for name in ("tensor", "data"):
        if name in asked:
            raise ConfigError(
                f"hal's configuration has parallel.{name} = {asked[name]}, which vLLM decides",
                f"leave it out, and set vLLM's {name}_parallel_size",
            )
    if (dtype := vllm_config.cache_config.cache_dtype) != "auto":
        raise ConfigError(
            f"hal does not support vLLM's kv_cache_dtype = {dtype}", "leave it out: hal's models declare their states"
        )
    if vllm_config.load_config.load_format == "dummy":
        raise ConfigError("hal loads no dummy weights", "pass a checkpoint, without load_format=dummy")
