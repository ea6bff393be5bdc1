"""Tests of which version of SGLang hal runs in, and of its arguments: each is served, or refused."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess

from helpers import ROOT
from helpers.sglang_server import needs_sglang
from helpers.vllm_programs import python

PROGRAM = """
import json
from hal.engines.sglang.server_args import NEUTRAL, SERVED_BY
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.server_args import ServerArgs
served = {who: sorted(names) for who, names in SERVED_BY.items()}
print("found: " + json.dumps([namespace_of(ServerArgs), served, sorted(NEUTRAL)]))
"""

REFUSED_GROUPS = {
    "exec.kernel",
    "exec.mamba",
    "exec.graph",
    "exec.comm",
    "exec.moe",
    "exec.overlap",
    "exec.offload",
    "exec.dllm",
    "exec.deterministic",
    "mm",
    "parallel",
    "spec",
    "disagg",
    "lora",
}
"""Groups of SGLang's arguments for what hal replaces or lacks. hal serves few of these, and refuses the rest."""

REFUSED = {
    "model": """
        load_format model_loader_extra_config is_embedding revision model_impl model_config_parser quantization
        quantization_param_path kv_cache_dtype modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile startup_weight_load_mode
        custom_weight_loader weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config
        download_dir model_checksum decrypted_config_file decrypted_draft_config_file
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket weight_cache_timeout
        qsa_indexer_dtype
    """,  # hal reads the files of a folder, and the model's configuration from it
    "serving": """
        asr_max_buffer_seconds asr_max_concurrent_sessions tokenizer_worker_num smg_grpc_mode
    """,  # speech, and processes in which SGLang applies no hook that checks a request
    "exec.features": """
        enable_fp32_lm_head enable_tf32_matmul enable_memory_saver enable_weights_cpu_backup
        enable_draft_weights_cpu_backup enable_return_hidden_states return_hidden_states_mode
        enable_return_routed_experts enable_return_indexer_topk enable_mis enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids
    """,  # of SGLang's models
    "schedule": """
        enable_dynamic_chunking c128_page_size swa_full_tokens_ratio prefill_only_disable_kv_cache
        disable_chunked_prefix_cache max_mamba_cache_size mamba_full_memory_ratio swa_prefix_tails
    """,  # pipelines, and caches of other forms
    "memory": """
        enable_page_major_kv_layout enable_unified_memory radix_cache_backend enable_hierarchical_cache
        hicache_host_memory_mode hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
        hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        hicache_host_memory_fraction enable_unified_cache_external_linker unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup enable_hisparse hisparse_config enable_lmcache
        lmcache_config_file enable_flexkv flexkv_config_file
    """,  # the keys and values are hal's
    "device": "device base_gpu_id gpu_id_step mlx_enable_sampling",  # hal's configuration names the device
    "observability": """
        kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers
        debug_tensor_dump_input_file forward_hooks msprobe_dump_config
    """,  # of SGLang's layers and cache
}
"""In the other groups, the arguments that hal refuses, except at their defaults and :data:`NEUTRAL` values."""


def test_the_page_names_the_version_that_is_installed() -> None:
    page = (ROOT / "docs" / "how-to" / "serve-with-sglang.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    tested = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    assert tested == re.findall(r"^SGLANG \?= (\S+)$", makefile, re.MULTILINE)


@needs_sglang
def test_every_argument_is_served_or_refused() -> None:
    """A version with a new one fails: somebody must find out who would serve it. Until then, hal refuses it."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    result = subprocess.run(
        [*python(), "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    found = re.search(r"^found: (.*)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    groups, served_by, neutral = json.loads(found[1])
    known = {name for name in groups if not name.startswith("_")}  # SGLang sets the others.
    served = [name for names in served_by.values() for name in names]
    refused = {name for names in REFUSED.values() for name in names.split()}
    refused |= {name for name in known if groups[name] in REFUSED_GROUPS} - {*served}
    assert known - refused - {*served} == set(), f"SGLang {importlib.metadata.version('sglang')} has new arguments"
    assert (refused | {*served} | {*neutral}) - known == set(), "SGLang has these arguments no longer"
    assert len(served) == len({*served})
    assert refused & {*served} == set()
    assert {*neutral} <= refused
