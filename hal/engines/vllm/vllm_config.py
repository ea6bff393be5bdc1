"""What of vLLM's configuration is hal's, and what hal refuses of the rest."""

from __future__ import annotations

import dataclasses
import os
from enum import Enum
from functools import reduce
from typing import Any

import hal
from hal.engines.vllm.speculative_config import draft_config
from hal.errors import ConfigError

REFUSED = {
    "lora_config.fully_sharded_loras": "it: ranks split an adapter as they split the projection",
    "lora_config.target_modules": "it: hal takes adapters of any projection",
    "lora_config.default_mm_loras": "adapters for kinds of inputs, and pass lora_request",
    "lora_config.enable_tower_connector_lora": "adapters of encoders",
    "lora_config.specialize_active_lora": "it: hal captures one graph for any number of adapters",
    "lora_config.enable_mixed_moe_lora_format": "it: hal reads the adapter of each expert by its number",
    "lora_config.enable_moe_shared_loras": "adapters whose experts share factors",
    "lora_config.max_lora_cls_labels": "classification heads",
    "ec_transfer_config": "encoder connectors",
    "watermark_config": "watermarks",
    "diffusion_config": "diffusion",
    "engram_config": "n-gram embeddings",
    "weight_transfer_config": "a weight transfer engine: call reload_weights instead",
    "aux_output_config.enabled": "auxiliary outputs, such as the experts of each token",
    "model_config.enable_return_routed_experts": "returning the experts of each token",
    "model_config.enable_prompt_embeds": "prompts of embeddings",
    "model_config.return_sampling_mask": "sampling masks",
    "model_config.enable_trace_replay": "the replay of traces",
    "model_config.enable_sleep_mode": "the sleep mode",
    "model_config.enable_cumem_allocator": "vLLM's allocator",
    "model_config.hf_overrides": "overrides of config.json: hal reads the checkpoint's own",
    "model_config.hf_config_path": "another config.json: hal reads the checkpoint's own",
    "model_config.config_format": "another format of config.json: hal reads Hugging Face's",
    "model_config.quantization_config": "quantization: hal reads the checkpoint's own scheme",
    "model_config.model_impl": "another implementation of the model: hal runs its own models",
    "model_config.use_fp64_gumbel": "draws in float64",
    "model_config.model_class_overrides": "other model classes: hal runs its own models",
    "model_config.multimodal_config.enable_mm_embeds": "prompts of embeddings",
    "model_config.multimodal_config.mm_processor_cache_type": "a cache in shared memory",
    "model_config.multimodal_config.mm_encoder_only": "encoders without their models",
    "model_config.multimodal_config.mm_encoder_tp_mode": "it: each rank runs the whole encoder",
    "model_config.multimodal_config.mm_encoder_attn_backend": "another attention: hal has its own",
    "model_config.multimodal_config.mm_encoder_attn_dtype": "attention in float8",
    "model_config.multimodal_config.skip_mm_profiling": "it: hal measures the encoder's step",
    "model_config.multimodal_config.video_pruning_rate": "pruned videos",
    "model_config.multimodal_config.mm_ipc_gpu_memory_gb": "memory of the device for decoding",
    "cache_config.kv_offloading_size": "a cache in the host's memory",
    "cache_config.kv_sharing_fast_prefill": "a fast prefill of shared caches",
    "cache_config.kv_cache_dtype_skip_layers": "layers with another cache: hal keeps all alike",
    "parallel_config.distributed_timeout_seconds": "it, and set parallel.timeout in hal's configuration",
    "parallel_config.cpu_distributed_timeout_seconds": "it, and set parallel.timeout in hal's configuration",
    "parallel_config.max_parallel_loading_workers": "loading in batches of ranks",
    "parallel_config.enable_batch_sharded_sampling": "sampling by ranks",
    "parallel_config.enable_hc_sp": "sequence parallelism",
    "parallel_config.expert_placement_strategy": "a placement of experts: hal gives ranks consecutive ones",
    "parallel_config.ubatch_size": "overlapped batches",
    "parallel_config.all2all_backend": "it, and set parallel.experts in hal's configuration",
    "parallel_config.enable_eplb": "balancing of experts",
    "parallel_config.enable_elastic_ep": "elastic expert parallelism",
    "parallel_config.enable_dbo": "overlapped batches",
    "parallel_config.enable_fault_tolerance": "fault tolerance",
    "observability_config.enable_layerwise_nvtx_tracing": "NVTX ranges",
    "observability_config.cudagraph_metrics": "metrics of CUDA graphs",
    "observability_config.jit_monitor_mode": "the monitor of Triton's compilations",
    "observability_config.jit_monitor_verbose": "the monitor of Triton's compilations",
    "optimization_level": "it, and set compilation.compiler in hal's configuration",
    "performance_mode": "it, and set compilation in hal's configuration",
}
"""What hal does not support or would not read, and what to start vLLM without. A version may lack some of it."""
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compilation_config": ("set compilation in hal's configuration", ("cudagraph_capture_sizes",)),
    "attention_config": ("hal has its own kernels", ()),
    "kernel_config": ("hal has its own kernels", ("enable_jit_warmup",)),  # which enforce_eager turns off
    "load_config": ("hal loads the weights", ("load_format", "use_tqdm_on_load")),
    "offload_config": ("hal does not offload", ()),
    "profiler_config": ("hal has no profiler for vLLM", ()),
}
"""Parts of vLLM's configuration of which hal reads nothing, or only some options: why, and which."""
SET_BY_VLLM: dict[tuple[str, str], Any] = {("GptOssForCausalLM", "max_cudagraph_capture_size"): 1024}
"""Options that vLLM itself sets for an architecture, before it asks the platform."""
VARIABLES = ("VLLM_BATCH_INVARIANT", "VLLM_FLOAT32_MATMUL_PRECISION")
"""Variables that change how vLLM's own model runner computes, and that hal does not read."""
CACHE_DTYPES = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
}
"""``cache.dtype`` of hal's configuration, by vLLM's names."""
LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")
"""How hal loads weights, by vLLM's names."""
SIZES = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")
"""Numbers of ranks that must be 1."""
PREPARED: set[str] = set()
"""The architectures whose images hal prepares."""
CONNECTOR = "HalConnector"
"""The name of hal's KV connector."""
CONNECTOR_OPTIONS = ("folder", "bytes")
"""The keys of its ``kv_connector_extra_config``."""
LOCAL_RANKS = "hal_local_ranks"
"""The key of ``additional_config`` that has the number of ranks on this machine."""
CAPTURE_SIZES = "hal_capture_sizes"
"""The key of ``additional_config`` that has vLLM's ``cudagraph_capture_sizes``, if they were asked for."""


def hal_config(vllm_config: Any) -> dict[str, Any]:
    """Return hal's configuration: ``hal`` in vLLM's ``additional_config``, or else the ``HAL_*`` variables."""
    return hal.read_config((vllm_config.additional_config or {}).get("hal"))


def check_config(vllm_config: Any) -> None:
    """Check vLLM's configuration.

    Raises:
        ConfigError: it asks for what hal does not support, or hal's own configuration has a size that vLLM decides.
    """
    for path, feature in REFUSED.items():
        *parts, name = path.split(".")
        part = reduce(lambda whole, each: getattr(whole, each, None), parts, vllm_config)
        value = getattr(part, name, None)
        if (value or isinstance(value, Enum)) and value != _default(part, name):
            raise ConfigError(f"hal does not support vLLM's {name} = {value!s:.70}", f"start vLLM without {feature}")
    for name in VARIABLES:
        if (value := os.environ.get(name, "0")) not in ("", "0", "highest"):
            raise ConfigError(f"hal does not read vLLM's variable {name} = {value}", "unset it")
    draft_config(vllm_config)
    if vllm_config.kv_transfer_config is not None:
        check_connector(vllm_config)
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
    if (dtype := vllm_config.cache_config.cache_dtype) != "auto" and dtype not in CACHE_DTYPES:
        raise ConfigError(
            f"hal does not support vLLM's kv_cache_dtype = {dtype}",
            f"leave it out, or pass one of {', '.join(CACHE_DTYPES)}",
        )
    lora, computed = vllm_config.lora_config, vllm_config.model_config.dtype
    if lora is not None and lora.lora_dtype not in ("auto", computed):
        raise ConfigError(
            f"hal does not support vLLM's lora_dtype = {lora.lora_dtype}: adapters have the model's dtype, {computed}",
            "leave it out",
        )
    if (form := vllm_config.load_config.load_format) not in LOAD_FORMATS:
        raise ConfigError(
            f"hal does not support vLLM's load_format = {form}: it reads safetensors of a checkpoint",
            f"leave it out, or pass one of {', '.join(LOAD_FORMATS)}",
        )
    model = vllm_config.model_config
    if not os.path.isdir(model.model):
        raise ConfigError(
            f"hal loads a checkpoint from a folder, and vLLM's model is {model.model!s:.70}, which is none",
            "download it, with hf download, and pass its folder",
        )
    if model.runner_type != "generate":
        raise ConfigError(f"hal does not support vLLM's runner = {model.runner_type}", "generate text")
    others = getattr(model, "multimodal_config", None)
    if others is not None and not others.language_model_only and not PREPARED.intersection(model.architectures):
        raise ConfigError(
            f"{model.model} reads images, which hal does not prepare for {', '.join(model.architectures)!s:.70} "
            f"in this version of vLLM",
            "pass --language-model-only for its text model, or serve it with `hal serve`",
        )
    if model.quantization is not None and getattr(model.hf_config, "quantization_config", None) is None:
        raise ConfigError(
            f"hal does not support vLLM's quantization = {model.quantization} of a checkpoint that is not quantized",
            "leave it out, or pass a quantized checkpoint, whose scheme hal reads",
        )


def check_connector(vllm_config: Any) -> None:
    """Check the configuration of a KV connector.

    Raises:
        ConfigError: it is not hal's, lacks its folder, or stands beside what moves no prefixes.
    """
    config, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if config.kv_connector != CONNECTOR or config.kv_connector_module_path:
        raise ConfigError(f"hal does not support vLLM's kv_connector = {config.kv_connector}", f"pass {CONNECTOR}")
    if "folder" not in config.kv_connector_extra_config:
        raise ConfigError(f"{CONNECTOR} has no folder", "set folder in kv_connector_extra_config, below /dev/shm")
    if others := config.kv_connector_extra_config.keys() - CONNECTOR_OPTIONS:
        raise ConfigError(
            f"hal does not read {', '.join(sorted(others))!s:.70} in kv_connector_extra_config",
            f"pass {' and '.join(CONNECTOR_OPTIONS)} only",
        )
    if parallel.world_size * parallel.data_parallel_size > 1:
        raise ConfigError(f"{CONNECTOR} does not support several ranks, each with a part of a prefix", "use one rank")
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            f"{CONNECTOR} does not support speculative decoding: a drafter's cache does not travel",
            "leave out speculative_config, or kv_transfer_config",
        )


def check_replaceable(vllm_config: Any) -> None:
    """Raise ConfigError if there is a KV connector, whose prefixes the former weights computed."""
    if vllm_config.kv_transfer_config is not None:
        raise ConfigError("prefixes of replaced weights do not travel", "start vLLM anew with the new checkpoint")


def check_unread(vllm_config: Any) -> None:
    """Check the parts of vLLM's configuration that hal does not read, before vLLM puts its defaults in.

    Raises:
        ConfigError: an option has another value than its default.
    """
    if LOCAL_RANKS in (vllm_config.additional_config or {}):  # In another process, where vLLM's defaults are in.
        return
    expected = {
        option: value
        for (architecture, option), value in SET_BY_VLLM.items()
        if architecture in vllm_config.model_config.architectures
    }
    for part_name, (why, read) in PARTS.items():
        part = getattr(vllm_config, part_name)
        default = type(part)()
        for each in dataclasses.fields(part):
            value, plain = getattr(part, each.name), getattr(default, each.name)
            off = getattr(value, "name", "") == "NONE"  # A mode, which enforce_eager turns off, too.
            taken = off or value in (plain, expected.get(each.name, plain))
            if each.init and each.name not in read and not taken:
                raise ConfigError(
                    f"hal does not support vLLM's {each.name} = {value!s:.70} in {part_name}", f"leave it out: {why}"
                )
    if others := sorted((vllm_config.additional_config or {}).keys() - {"hal"}):
        raise ConfigError(
            f"hal does not read {', '.join(others)!s:.70} in vLLM's additional_config, only hal",
            "put hal's configuration under the key hal",
        )
    if sizes := vllm_config.compilation_config.cudagraph_capture_sizes:
        vllm_config.additional_config = {**(vllm_config.additional_config or {}), CAPTURE_SIZES: sorted(sizes)}


def _default(part: Any, name: str) -> Any:
    """Return the default of an option, or None if vLLM declares none."""
    declared = getattr(getattr(type(part), "__dataclass_fields__", {}).get(name), "default", None)
    return getattr(declared, "default", declared)  # Some are declared by pydantic.
