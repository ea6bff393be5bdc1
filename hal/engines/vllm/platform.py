"""The platform: what vLLM asks before a worker exists. hal owns the devices; vLLM sees a host without any."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from hal.errors import ConfigError

REFUSED = {
    "speculative_config": "speculative decoding", "lora_config": "LoRA", "kv_transfer_config": "KV connectors",
    "ec_transfer_config": "encoder connectors",
}  # fmt: skip
"""What of vLLM's configuration hal does not support, by the name of its part."""


class HalPlatform(Platform):
    """Runs models on the hal backend that ``additional_config={"hal": {...}}`` configures."""

    _enum = PlatformEnum.OOT
    device_name = "hal"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    ray_device_key = ""
    device_control_env_var = "HAL_VLLM_VISIBLE_DEVICES"
    supported_quantization: list[str] = []  # noqa: RUF012 - as vLLM declares it; hal reads a checkpoint's own scheme
    simple_compile_backend = "eager"  # vLLM's sampler compiles with it, and Inductor does not know every device.

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes of computation, the preferred one first."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the name that vLLM prints."""
        return "hal"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the host's memory. The worker measures the device's."""
        return int(psutil.virtual_memory().total)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Return False: hal pins what it copies."""
        return False

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Select hal's worker, and leave compilation to hal.

        Raises:
            ConfigError: the configuration asks for what hal does not support.
        """
        from vllm.config import CompilationMode, CUDAGraphMode  # vllm.config imports this module.

        for name, feature in REFUSED.items():
            if getattr(vllm_config, name, None) is not None:
                raise ConfigError(f"hal does not support vLLM's {name}", f"start vLLM without {feature}")
        parallel = vllm_config.parallel_config
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if (size := getattr(parallel, name)) > 1:
                raise ConfigError(f"hal does not support vLLM's {name} = {size}", "leave it at 1")
        if (dtype := vllm_config.cache_config.cache_dtype) != "auto":
            raise ConfigError(
                f"hal does not support vLLM's kv_cache_dtype = {dtype}",
                "leave it out: hal's models declare their states",
            )
        if vllm_config.load_config.load_format == "dummy":
            raise ConfigError("hal loads no dummy weights", "pass a checkpoint, without load_format=dummy")
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "hal.engines.vllm.worker.HalWorker"
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Do nothing: the worker takes the backend's block size."""
