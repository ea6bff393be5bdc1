"""Tests of which versions of vLLM hal runs in, and of what it imports of them."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import re
from pathlib import Path

from helpers import ROOT
from helpers.vllm_programs import needs_vllm, run
from packaging.requirements import Requirement

from hal.engines.vllm.vllm_config import PARTS, REFUSED

ADAPTER = ROOT / "hal" / "engines" / "vllm"
PROGRAM = """
import importlib, json, sys
missing = []
for module, name in json.loads(sys.argv[1]):
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing.append([module, name, str(error)])
print("missing: " + json.dumps(missing))
"""

BY_HAL = {
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words_token_ids",
}
"""Sampling parameters that the adapter reads."""
BY_VLLM = {
    "by the scheduler and the output": {
        "n",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "detokenize",
        "skip_special_tokens",
        "stream_interval",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "output_text_buffer_length",
        "flat_logprobs",
        "skip_clone",
        "skip_reading_prefix_cache",
        "repetition_detection",
        "bad_words",
        "_bad_words_token_ids",
        "_eos_token_id",
        "_all_stop_token_ids",
        "_watermarking_skipped",
    },
    "by what the adapter gives them to": {
        "min_tokens",
        "min_p",
        "logit_bias",
        "extra_args",
        "structured_outputs",
        "thinking_token_budget",
    },
    "with an option that hal or vLLM refuses": {
        "watermarking",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "routed_experts_prompt_start",
        "trace_decode_token_ids",
    },
}
"""Sampling parameters that the adapter need not read: who does."""

CONFIG_BY_HAL = {
    "model_config": {
        "model",
        "dtype",
        "seed",
        "max_model_len",
        "enforce_eager",
        "quantization",
        "logprobs_mode",
        "logits_processors",
        "hf_config",
        "multimodal_config",
    },
    "cache_config": {
        "block_size",
        "user_specified_block_size",
        "cache_dtype",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    },
    "parallel_config": {
        "data_parallel_size",
        "data_parallel_size_local",
        "data_parallel_index",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "assigned_physical_gpu_ids",
        "world_size",
        "worker_cls",
        "enable_expert_parallel",
    },
    "scheduler_config": {"max_num_batched_tokens", "max_num_seqs"},
    "reasoning_config": set(),
    "additional_config": set(),
}
"""Options of vLLM's configuration that the adapter reads, by part."""
CONFIG_BY_VLLM = {
    "model_config": {
        # by the engine's front and the scheduler
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
        "trust_remote_code",
        "max_logprobs",
        "allowed_local_media_path",
        "allowed_media_domains",
        "served_model_name",
        "hf_token",
        "generation_config",
        "override_generation_config",
        "io_processor_plugin",
        "renderer_num_workers",
        "disable_sliding_window",
        # names of the hub, which hal refuses; other runners; drafts; the sleep mode, which is refused
        "model_weights",
        "revision",
        "code_revision",
        "runner",
        "convert",
        "pooler_config",
        "spec_target_max_model_len",
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
        "enable_nccl_comm_suspend",
        "allow_deprecated_quantization",
        # no effect in vLLM itself, and what vLLM derives
        "disable_cascade_attn",
        "hf_text_config",
        "is_submodel_config",
        "word_embeddings_untied_by_checkpoint",
    },
    "cache_config": {
        # by the scheduler
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "num_gpu_blocks_override",
        # by a KV connector, which hal refuses
        "kv_offloading_size",
        "kv_offloading_backend",
        "num_cpu_blocks",
        "simple_cpu_offload_num_blocks",
        # for models that hal does not have, or refuses
        "mamba_page_size_padded",
        "mamba_block_size",
        "user_specified_mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "enable_mamba_shared_prefix_checkpoint",
        "skip_page_size_padded",
        "enable_mamba_fine_grained_prefix_cache",
        "replayssm_buffer_len",
        "use_replayssm",
        "use_kda_recoverssm",
        "swa_bounded_replay",
        # what vLLM derives
        "is_attention_free",
        "sliding_window",
        "num_gpu_blocks",
        "effective_attention_block_size",
        "kv_cache_layout",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "hash_block_size",
        "cache_hit_alignment_tokens",
        "_block_size_resolved",
    },
    "parallel_config": {
        # by the executor and the replicas' coordinator
        "tensor_parallel_size",
        "data_parallel_rank",
        "data_parallel_rank_local",
        "data_parallel_master_ip",
        "data_parallel_rpc_port",
        "dp_sync_interval",
        "data_parallel_master_port",
        "data_parallel_backend",
        "data_parallel_external_lb",
        "data_parallel_hybrid_lb",
        "enable_shm_tensor_arena",
        "ray_workers_use_nsight",
        "ray_runtime_env",
        "placement_group",
        "distributed_executor_backend",
        "worker_extension_cls",
        "sd_worker_cls",
        "master_addr",
        "master_port",
        "node_rank",
        "nnodes",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
        # hal has neither of these kernels, so they are off
        "disable_custom_all_reduce",
        "disable_nccl_for_dp_synchronization",
        # with an option or a number of ranks that hal refuses
        "enable_ep_weight_filter",
        "eplb_config",
        "elastic_ep_max_dp_size",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "dcp_kv_cache_interleave_size",
        "dcp_comm_backend",
        "dcp_q_replicate",
        "cp_kv_cache_interleave_size",
        "fault_tolerance_config",
        # what vLLM derives
        "is_moe_model",
        "rank",
        "_data_parallel_master_port_list",
        "_coord_store_port",
        "_api_process_count",
        "_api_process_rank",
        "_allow_auto_resolve_cp_interleave_size",
    },
    "scheduler_config": {
        "runner_type",
        "max_num_scheduled_tokens",
        "max_num_active_seqs",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "enable_chunked_prefill",
        "is_multimodal_model",
        "max_num_encoder_input_tokens",
        "encoder_cache_size",
        "policy",
        "disable_chunked_mm_input",
        "scheduler_cls",
        "disable_hybrid_kv_cache_manager",
        "scheduler_reserve_full_isl",
        "watermark",
        "prefill_schedule_interval",
        "async_scheduling",
        "stream_interval",
    },
    "observability_config": {
        "show_hidden_metrics_for_version",
        "otlp_traces_endpoint",
        "collect_detailed_traces",
        "per_request_spec_decode_metrics",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "custom_histogram_buckets",
        "enable_mfu_metrics",
        "enable_mm_processor_stats",
        "enable_logging_iteration_details",
    },
    "structured_outputs_config": {
        "backend",
        "disable_any_whitespace",
        "disable_additional_properties",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "enable_in_reasoning",
    },
    "aux_output_config": {"enable_return_routed_experts", "max_bytes"},  # parts of what is refused
    "device_config": {"device", "device_type"},  # as the platform says
    "logging_config": {"log_level", "formatter", "configure_logging", "pylogging_config_file"},
    "watchdog_config": {"timeout", "check_interval", "dump_dir"},
    # for models that hal does not have, or refuses
    "ec_manager_config": {"encoder_cache_manager_cls", "manager_config"},
    "mamba_config": {"backend", "enable_stochastic_rounding", "stochastic_rounding_philox_rounds", "ssu_algorithm"},
    # whole parts that are None, or no dataclass
    "kv_events_config": set(),
    "quant_config": set(),
    "instance_id": set(),
    "shutdown_timeout": set(),
}
"""Options that the adapter need not read, by part."""
OPTIONS = """
import dataclasses, json, sys
from vllm import EngineArgs
config = EngineArgs(model=sys.argv[1], max_model_len=64).create_engine_config()
parts = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
print("options: " + json.dumps({
    name: [each.name for each in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    for name, part in parts.items()
}))
"""


def imported() -> dict[tuple[str, str], str]:
    """Return the modules and names that the adapter imports of vLLM, each with a file that imports it."""
    found = {}
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found |= {(str(node.module), each.name): path.name for each in node.names}
    return dict(sorted(found.items()))


def test_the_page_names_the_versions_that_are_installed() -> None:
    page = (ROOT / "docs" / "how-to" / "serve-with-vllm.md").read_text(encoding="utf-8")
    tested = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    (extra,) = config["options.extras_require"]["vllm"].split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert tested
    assert list(Requirement(extra).specifier.filter(tested)) == tested
    assert set(re.findall(r"^VLLM \?= (\S+)$", makefile, re.MULTILINE)) <= set(tested)


@needs_vllm
def test_vllm_has_what_the_adapter_imports() -> None:
    names = imported()
    result = run(PROGRAM, json.dumps(list(names)))
    found = re.search(r"^missing: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    print(*(f"{file}: {module}.{name}" for (module, name), file in names.items()), sep="\n")  # noqa: T201
    missing = [f"{names[module, name]} imports {name}: {error}" for module, name, error in json.loads(found[1])]
    assert missing == [], f"vLLM {importlib.metadata.version('vllm')} lacks some of the names"


@needs_vllm
def test_every_sampling_parameter_is_read() -> None:
    """A version with a new one fails: somebody must find out whether a worker has to read it."""
    result = run("from vllm import SamplingParams; print('fields:', *SamplingParams.__struct_fields__)")
    found = re.search(r"^fields: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    unknown = {*found[1].split()} - BY_HAL.union(*BY_VLLM.values())
    assert unknown == set(), f"vLLM {importlib.metadata.version('vllm')} has new sampling parameters"


@needs_vllm
def test_every_option_is_read_or_refused(trained: Path) -> None:
    """A version with a new one fails, as above."""
    result = run(OPTIONS, str(trained))
    found = re.search(r"^options: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    unknown = []
    for part, names in json.loads(found[1]).items():
        if part in PARTS or part in REFUSED:
            continue
        if part not in CONFIG_BY_HAL and part not in CONFIG_BY_VLLM:
            unknown.append(part)
        known = CONFIG_BY_HAL.get(part, set()) | CONFIG_BY_VLLM.get(part, set())
        unknown += [f"{part}.{name}" for name in names if name not in known and f"{part}.{name}" not in REFUSED]
    assert unknown == [], f"vLLM {importlib.metadata.version('vllm')} has new options"


def test_the_adapter_reads_what_is_its_own() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ADAPTER.glob("*.py"))
    own = BY_HAL.union(CONFIG_BY_HAL, *CONFIG_BY_HAL.values())
    read = {name for name in own if re.search(rf"\.{name}\b", text) or f'"{name}"' in text}
    assert read == own
