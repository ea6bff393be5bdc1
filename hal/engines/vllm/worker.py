"""The worker: one hal backend, model and runner, which vLLM's scheduler drives."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import attrs
from torch import Tensor
from vllm.distributed import destroy_distributed_environment, init_distributed_environment
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

import hal
from hal.checkpoint.random_weights import meta_model
from hal.config import require
from hal.engines.vllm.adapters import LoadedAdapters
from hal.engines.vllm.cache_groups import specs_of, use_groups
from hal.engines.vllm.kv_connector import FolderMetadata
from hal.engines.vllm.model_runner import HalModelRunner
from hal.engines.vllm.speculative_config import draft_config
from hal.engines.vllm.vllm_config import CACHE_DTYPES, CAPTURE_SIZES, LOCAL_RANKS, check_replaceable, hal_config
from hal.errors import ConfigError, ModelError
from hal.generation.drafting.drafter import DraftPlan, plan_drafter
from hal.generation.drafting.speculation import capture_drafts
from hal.step import SEQUENCE
from hal.step.fields import DUMMY_BLOCK

log = logging.getLogger("vllm.hal")


class HalWorker(WorkerBase):
    """Implements vLLM's worker with hal. vLLM decides the blocks' number, hal their layout."""

    runner_type = hal.Runner
    """The class of the runner."""

    def init_device(self) -> None:
        """Open the backend, and join the other ranks of this replica."""
        asked = hal_config(self.vllm_config)
        config = {"max_prefill_tokens": self.scheduler_config.max_num_batched_tokens, **asked}
        require(config, "dtype", str(self.model_config.dtype).removeprefix("torch."), "vLLM's dtype")
        if (cache := CACHE_DTYPES.get(self.cache_config.cache_dtype)) is not None:
            require(config, "cache.dtype", cache, "vLLM's kv_cache_dtype")
        if (lora := self.lora_config) is not None:
            require(config, "adapters.slots", lora.max_cpu_loras, "vLLM's max_cpu_loras")
            require(config, "adapters.rank", lora.max_lora_rank, "vLLM's max_lora_rank")
        if self.cache_config.user_specified_block_size:
            require(config, "cache.block_size", self.cache_config.block_size, "vLLM's block_size")
        if self.model_config.enforce_eager:
            require(config, "compilation.compiler", "eager", "vLLM's enforce_eager")
        if (sizes := self.vllm_config.additional_config.get(CAPTURE_SIZES)) is not None:
            require(config, "compilation.capture_sizes", sizes, "vLLM's cudagraph_capture_sizes")
        choose_device(self.parallel_config, self.local_rank)
        self.opened = ExitStack()
        self.draft_states: hal.step.StateSpec | None = None
        self.backend = hal.open(config)
        self.device = self.backend.device.torch
        join_ranks(self.backend, self.parallel_config, self.rank, self.local_rank, self.distributed_init_method)
        self.cache_config.block_size = self.backend.block_size
        log.info("hal: %r", self.backend)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the checkpoint, or random weights in its place: vLLM's dummy weights, which others replace later."""
        dummy = load_dummy_weights or self.load_config.load_format == "dummy"
        opened = (hal.RandomCheckpoint if dummy else hal.Checkpoint).open(self.model_config.model)
        self.draft_plan = self._plan_drafter(opened)
        self.model = hal.load_model(opened, self.backend)
        if self.draft_plan is not None:
            self.draft_states = self.draft_plan.load(self.model, self.backend, None)
        if not self.model.causal:
            raise ModelError(
                f"{type(self.model).__name__} attends to later tokens, so it generates no text", "use hal.LLM.embed"
            )
        recurrent = any(state.per is SEQUENCE for layer in self.model.states for state in layer.values())
        if recurrent and not self.model_config.is_hybrid:  # See images.ReadsImages.
            raise ModelError(
                f"vLLM does not know that {type(self.model).__name__} keeps states per sequence",
                "install torchvision, which vLLM's class of it needs",
            )

    def _plan_drafter(self, checkpoint: hal.Checkpoint) -> DraftPlan | None:
        """Return what drafts tokens; None without speculative decoding.

        Raises:
            ConfigError: it does not fit the model.
        """
        config = draft_config(self.vllm_config)
        if config is None:
            return None
        states = [
            state
            for layer in meta_model(checkpoint.config, self.backend.config.model_source).states
            for state in layer.values()
        ]
        if any(each.per is SEQUENCE for each in states):
            raise ConfigError(
                f"{checkpoint.architecture} keeps states per sequence, from which hal drops no rejected drafts in vLLM",
                "leave out speculative_config, or serve the model with `hal serve --draft`",
            )
        if config.method != "ngram" and any(each.window is not None for each in states):
            raise ConfigError(
                f"vLLM frees the blocks before the windows of {checkpoint.architecture}, which a drafting model reads",
                "draft with ngram, or leave out speculative_config",
            )
        plan = plan_drafter(config, checkpoint, self.backend)
        capture_drafts(self.backend, 1 + config.tokens)
        return plan

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Write new weights in place of the loaded ones. vLLM's prefix cache must be reset after it.

        Args:
            weights_iterator: names in the checkpoint and tensors; None reads them from a checkpoint.
            weights_path: the folder of that checkpoint; None for the model's own.
            is_checkpoint_format: must be True.

        Raises:
            ConfigError: the weights are said not to be in a checkpoint's format, or there is a KV connector.
            CheckpointError: they do not fit the model.
        """
        check_replaceable(self.vllm_config)
        if not is_checkpoint_format:
            raise ConfigError("hal replaces weights in a checkpoint's format only", "leave is_checkpoint_format out")
        if weights_iterator is None:
            checkpoint = hal.Checkpoint.open(weights_path or self.model_config.model)
            weights_iterator = checkpoint.read(checkpoint.tensors)
        hal.replace_weights(self.model_runner.runner, weights_iterator)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter unless it is loaded, or if ``load_inplace`` asks for it.

        Raises:
            CheckpointError: its files are missing or damaged, or do not fit the model.
            ConfigError: its rank is above ``max_lora_rank``, all slots are pinned, or vLLM has no ``enable_lora``.
        """
        self._adapters().add(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter, and return whether it was loaded. Requests that run with it load it again."""
        return self._adapters().remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded until it is removed.

        Raises:
            ConfigError: it is not loaded.
        """
        self._adapters().pin(lora_id)
        return True

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return self._adapters().numbers

    def _adapters(self) -> LoadedAdapters:
        if self.model_runner.adapters is None:
            raise ConfigError("vLLM was started without room for adapters", "start it with --enable-lora")
        found: LoadedAdapters = self.model_runner.adapters
        return found

    def get_model(self) -> Any:
        """Return the model."""
        return self.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return that text is generated."""
        return ("generate",)

    def get_kv_cache_spec(self) -> Mapping[str, KVCacheSpec]:
        """Return what each layer keeps, in vLLM's classes.

        Raises:
            ModelError: layers keep states that vLLM's groups cannot share memory for.
        """
        return specs_of(
            self.model,
            self.backend.block_size,
            mode=self.cache_config.mamba_cache_mode,
            longest=self.model_config.max_model_len,
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return any layout of vLLM's, since hal has its own."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return [next(iter(KVCacheLayout)).name]

    def determine_available_memory(self) -> int:
        """Return the bytes for the cache: those asked for, or what weights, steps and captures leave of vLLM's share.

        ``kv_cache_memory_bytes`` asks for bytes, of which a drafter's cache takes its part, and ``cache.num_tokens`` in
        hal's configuration for tokens.

        Raises:
            DeviceOutOfMemory: the largest step does not fit.
        """
        asked = self.cache_config.kv_cache_memory_bytes
        if asked is not None:
            return self._without_drafter(int(asked))
        if (tokens := hal_config(self.vllm_config).get("cache", {}).get("num_tokens")) is not None:
            blocks = math.ceil(tokens / self.backend.block_size) + DUMMY_BLOCK + 1
            return int(blocks * sum(each.page_size_bytes for each in self.get_kv_cache_spec().values()))
        share = self.cache_config.gpu_memory_utilization
        if isinstance(self.backend.device, hal.vendor.HostDevice):  # Its ranks have one memory; devices have one each.
            share /= self.vllm_config.additional_config[LOCAL_RANKS]
        plan = hal.plan_memory(
            self.model,
            self.backend,
            max_sequences=self.scheduler_config.max_num_seqs,
            max_length=self.model_config.max_model_len,
            share=share,
        )
        log.info("hal's memory:\n%s", plan)
        return self._without_drafter(plan.available)

    def _without_drafter(self, available: int) -> int:
        """Return what the cache of a drafter, which has as many blocks, leaves of some bytes."""
        if self.draft_states is None:
            return available
        own = sum(each.page_size_bytes for each in self.get_kv_cache_spec().values())
        beside = self.draft_states.token_bytes * self.backend.block_size
        return int(available * own // (own + beside))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the runner with as many blocks as vLLM decided. Block 0 is vLLM's null block, and hal's dummy block.

        Raises:
            ModelError: vLLM's groups have blocks of different numbers of tokens.
        """
        longest = self.model_config.max_model_len
        groups = use_groups(self.model, self.backend.block_size, longest, kv_cache_config)
        runner = self.runner_type(
            self.model,
            self.backend,
            max_sequences=self.scheduler_config.max_num_seqs,
            max_length=longest,
            num_blocks=kv_cache_config.num_blocks if groups is None else None,
        )
        drafter = None
        if self.draft_plan is not None:
            sequences = self.scheduler_config.max_num_seqs
            drafter = self.draft_plan.open(runner, self.opened, sequences, longest)
        self.model_runner = HalModelRunner(self.vllm_config, runner, groups, drafter)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], FolderMetadata] | None:
        """Return the folder of prefixes, for the scheduler; None without a KV connector."""
        mover = self.model_runner.mover
        return None if mover is None else {(0, 0): FolderMetadata(mover.folder)}

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Return no times: the runner has captured and compiled already."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Choose the tokens of the last step."""
        return self.model_runner.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> Any:
        """Return the drafted tokens that follow the last step."""
        return self.model_runner.take_draft_token_ids()

    def execute_dummy_batch(self) -> None:
        """Run a step for other replicas, if they share experts with this one."""
        self.model_runner.runner.idle()

    def update_max_model_len(self, max_model_len: int) -> None:
        """Do nothing: the runner takes any shorter length."""

    def reset_encoder_cache(self) -> None:
        """Forget the embeddings of images, which other weights may have computed."""
        self.model_runner.runner.forget()

    def sleep(self, level: int = 1) -> None:
        """Refuse to give the device's memory back.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"hal does not support vLLM's sleep of level {level}, which gives memory back",
            "resume the generation, which vLLM has paused; sleep(0) pauses only",
        )

    def synchronize_device(self) -> None:
        """Wait for the device."""
        self.backend.device.synchronize()

    def shutdown(self) -> None:
        """Close the backend."""
        self.opened.close()
        self.backend.close()
        leave_ranks(self.parallel_config)


def choose_device(parallel: Any, local_rank: int) -> None:
    """Set ``LOCAL_RANK``, from which hal's drivers take the device, to the number of this rank's device.

    Args:
        local_rank: the rank's number among those of its replica on this machine.
    """
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is not None:
        os.environ["LOCAL_RANK"] = str(assigned[local_rank])
    elif parallel.world_size > 1:
        os.environ["LOCAL_RANK"] = str(local_rank)


def join_ranks(backend: hal.Backend, parallel: Any, rank: int, local_rank: int, init_method: str) -> None:
    """Join the other ranks.

    Args:
        backend: an open backend without ranks.
        rank: the rank's number in its replica.
        local_rank: the rank's number among those of its replica on this machine.
        init_method: where the ranks of the replica meet.

    Raises:
        ConfigError: the backend does not work with several devices.
        CommunicationError: the ranks do not reach each other.
    """
    tensor, data = parallel.world_size, parallel.data_parallel_size  # 1 for a dense model, whose replicas are alone
    if tensor * data == 1:
        return
    config = backend.config
    if backend.distributed is not None:  # Otherwise configure() refuses.
        timeout = timedelta(seconds=config.parallel.timeout)
        init_distributed_environment(tensor, rank, init_method, local_rank, backend.distributed, timeout)
    backend.configure(attrs.evolve(config, parallel=attrs.evolve(config.parallel, tensor=tensor, data=data)))


def leave_ranks(parallel: Any) -> None:
    """End what :func:`join_ranks` has started."""
    if parallel.world_size * parallel.data_parallel_size > 1:
        destroy_distributed_environment()
