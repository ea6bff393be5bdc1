"""The platform, by which vLLM checks its configuration. hal owns the devices; vLLM sees a host without any."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from hal.engines.vllm.vllm_config import LOCAL_RANKS, check_config, check_unread


class HalPlatform(Platform):
    """Runs models on the hal backend that ``additional_config={"hal": {...}}`` configures."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"  # Both name a torch device.
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
    def set_device(cls, device: torch.device) -> None:
        """Make the worker's device the current one of a thread, such as the one that waits for results."""
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Return False: hal pins what it copies."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Return True: layers with windows, or with states per sequence, may have blocks of their own."""
        return True

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Check what hal does not read, and keep the sizes of captures. Later, vLLM's defaults look the same.

        Raises:
            ConfigError: an option of vLLM's that hal does not read has another value than its default.
        """
        check_unread(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Select hal's worker, and leave compilation to hal.

        Raises:
            ConfigError: the configuration asks for what hal does not support.
        """
        from vllm.config import CompilationMode, CUDAGraphMode  # vllm.config imports this module.

        check_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "hal.engines.vllm.worker.HalWorker"
        # A worker of a dense replica no longer sees how many others there are.
        ranks = parallel.world_size * max(1, parallel.data_parallel_size_local)
        vllm_config.additional_config = {LOCAL_RANKS: ranks, **(vllm_config.additional_config or {})}
        # A forked process could use neither a device that this one has opened, nor its threads of OpenMP.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes = []

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Do nothing: the worker takes the backend's block size."""
