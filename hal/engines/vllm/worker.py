"""The worker: one hal backend, model and runner, which vLLM's scheduler drives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

import hal
from hal.drivers.compiler_registry import EAGER
from hal.engines.vllm.model_runner import HalModelRunner
from hal.engines.vllm.ranks import choose_device, join_ranks, leave_ranks
from hal.errors import ConfigError, ModelError

log = logging.getLogger("vllm.hal")


class HalWorker(WorkerBase):
    """Implements vLLM's worker with hal. vLLM decides the blocks' number, hal their layout."""

    def init_device(self) -> None:
        """Open the backend, and join the other ranks of this replica."""
        asked = dict((self.vllm_config.additional_config or {}).get("hal", {}))
        cache = dict(asked.get("cache", {}))
        if self.cache_config.user_specified_block_size:
            cache["block_size"] = self.cache_config.block_size
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        longest = self.scheduler_config.max_num_batched_tokens
        config = {"max_prefill_tokens": longest, **asked, "dtype": dtype, "cache": cache}
        eager = {"compiler": EAGER}
        if self.model_config.enforce_eager and config.setdefault("compilation", eager) != eager:
            raise ConfigError(
                f"enforce_eager is set, and hal's compilation is {config['compilation']}", "leave one of them out"
            )
        choose_device(self.parallel_config, self.local_rank)
        self.backend = hal.open(config)
        self.device = self.backend.device.torch
        join_ranks(self.backend, self.parallel_config, self.rank, self.local_rank, self.distributed_init_method)
        torch.manual_seed(self.model_config.seed)  # All ranks draw the same tokens.
        self.cache_config.block_size = self.backend.block_size
        log.info("hal: %r", self.backend)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the checkpoint.

        Raises:
            ConfigError: vLLM asks for weights without a checkpoint.
        """
        if load_dummy_weights:
            raise ConfigError("hal loads no dummy weights", "pass a checkpoint")
        self.model = hal.load_model(self.model_config.model, self.backend)

    def get_model(self) -> Any:
        """Return the model."""
        return self.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return that text is generated."""
        return ("generate",)

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return what each layer keeps for a token, in vLLM's classes.

        Raises:
            ModelError: a layer keeps anything but a key and a value per token.
        """
        dtype = next(self.model.parameters()).dtype
        return {
            f"layers.{index}": _spec_of(index, states, self.backend.block_size, dtype)
            for index, states in enumerate(self.model.states)
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return any layout of vLLM's, since hal has its own."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return [next(iter(KVCacheLayout)).name]

    def determine_available_memory(self) -> int:
        """Return the bytes for the cache: those asked for, or what the weights leave of the share vLLM may use."""
        asked = self.cache_config.kv_cache_memory_bytes
        if asked is not None:
            return int(asked)
        stats = self.backend.device.memory_stats()
        share = int(stats.total * self.cache_config.gpu_memory_utilization)
        return max(0, min(stats.free, share - stats.allocated))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the runner with as many blocks as vLLM decided. Block 0 is vLLM's null block, and hal's dummy block.

        Raises:
            ModelError: vLLM puts the layers into several groups, which have blocks of their own.
        """
        if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
            raise ModelError(
                f"vLLM puts the layers into {groups} groups with blocks of their own; hal's worker supports one",
                "run the model with hal.generate",
            )
        config = self.backend.config
        tokens = (kv_cache_config.num_blocks - 1) * self.backend.block_size
        self.backend.configure(attrs.evolve(config, cache=attrs.evolve(config.cache, num_tokens=tokens)))
        runner = hal.Runner(
            self.model, self.backend, max_sequences=self.scheduler_config.max_num_seqs,
            max_length=self.model_config.max_model_len,
        )  # fmt: skip
        self.model_runner = HalModelRunner(self.vllm_config, runner)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Return no times: the runner has captured and compiled already."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Choose the tokens of the last step."""
        return self.model_runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """Run a step for other replicas, if they share experts with this one."""
        self.model_runner.runner.idle()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Do nothing: the runner takes any shorter length."""

    def synchronize_device(self) -> None:
        """Wait for the device."""
        self.backend.device.synchronize()

    def shutdown(self) -> None:
        """Close the backend."""
        self.backend.close()
        leave_ranks(self.parallel_config)


def _spec_of(index: int, states: Mapping[str, hal.State], block_size: int, dtype: Any) -> KVCacheSpec:
    first, *others = states.values()
    if first.per is not hal.step.TOKEN or len(first.shape) != 2 or others != [first]:
        raise ModelError(
            f"layer {index} keeps {dict(states)!s:.200}; hal inside vLLM supports a key and a value per token only",
            "run the model with hal.generate",
        )
    # A window is left out: vLLM would take blocks away that hal's attention still names.
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=first.shape[0], head_size=first.shape[1], dtype=first.dtype or dtype
    )
