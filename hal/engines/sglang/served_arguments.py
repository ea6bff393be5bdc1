"""The arguments of SGLang that have an effect under hal. All others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SERVED_BY: Mapping[str, frozenset[str]] = MappingProxyType({
    "the adapter": frozenset({
        "model_path", "context_length", "trust_remote_code", "json_model_override_args", "dtype",
        "delete_ckpt_after_loading", "enable_torch_compile", "torch_compile_max_bs", "disable_cuda_graph",
        "disable_prefill_cuda_graph", "disable_decode_cuda_graph", "page_size", "disable_overlap_schedule",
    }),
    "SGLang's scheduler and radix cache": frozenset({
        "mem_fraction_static", "max_running_requests", "max_queued_requests", "max_total_tokens",
        "chunked_prefill_size", "prefill_decode_interval", "prefill_decode_interval_min_bs", "max_prefill_tokens",
        "prefill_max_requests", "schedule_policy", "enable_priority_scheduling", "disable_priority_preemption",
        "default_priority_value", "abort_on_priority_when_disabled", "schedule_low_priority_values_first",
        "priority_scheduling_preemption_threshold", "retraction_policy", "schedule_conservativeness",
        "num_continuous_decode_steps", "scheduler_recv_interval", "enable_mixed_chunk", "enable_prefill_delayer",
        "prefill_delayer_max_delay_passes", "prefill_delayer_token_usage_low_watermark",
        "prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets",
        "prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms", "min_free_slots_delay",
        "disable_hybrid_swa_memory", "radix_eviction_policy", "radix_eviction_policy_config", "disable_radix_cache",
        "enable_session_radix_cache",
    }),
    "its sampler": frozenset({
        "sampling_backend", "grammar_backend", "enable_custom_logit_processor", "disable_outlines_disk_cache",
        "sampling_mask_max_tokens", "enable_watermark", "watermark_config", "watermark_key", "watermark_key_b",
        "watermark_context_window", "watermark_mixing_probability", "watermark_max_probability",
        "watermark_default_enabled", "watermark_enforce_all",
    }),
    "its server and tokenizer": frozenset({
        "tokenizer_path", "tokenizer_mode", "tokenizer_backend", "detokenizer_worker_num",
        "skip_tokenizer_init", "host", "port", "fastapi_root_path", "grpc_mode", "grpc_port",
        "grpc_worker_threads", "grpc_response_timeout_secs", "sidecar", "sidecar_args", "skip_server_warmup",
        "warmups", "enable_http2", "http2_max_concurrent_streams", "http2_initial_connection_window_size",
        "enable_http_worker_reuseport", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password",
        "enable_ssl_refresh", "api_key", "admin_api_key", "served_model_name", "weight_version", "chat_template",
        "trust_request_chat_template", "hf_chat_template_name", "completion_template", "file_storage_path",
        "enable_cache_report", "return_input_ids", "return_output_ids", "reasoning_parser",
        "default_chat_template_kwargs", "strip_thinking_cache", "enable_strict_thinking", "tool_call_parser",
        "tool_server", "sampling_defaults", "preferred_sampling_params", "allow_auto_truncate", "stream_interval",
        "batch_notify_size", "stream_response_default_include_usage", "incremental_streaming_output",
        "enable_streaming_session", "constrained_json_whitespace_pattern", "constrained_json_disable_any_whitespace",
        "constrained_json_max_whitespace_cnt", "enable_dynamic_batch_tokenizer", "dynamic_batch_tokenizer_batch_size",
        "dynamic_batch_tokenizer_batch_timeout", "enable_tokenizer_batch_encode", "disable_tokenizer_batch_decode",
        "enable_response_store",
    }),
    "its processes": frozenset({
        "random_seed", "watchdog_timeout", "soft_watchdog_timeout", "sleep_on_idle", "use_ray",
        "custom_sigquit_handler", "numa_node", "gc_threshold", "nccl_port", "dist_timeout", "dist_init_addr",
        "gated_launch_port",
    }),
    "its logs and metrics": frozenset({
        "log_level", "log_level_http", "log_requests", "log_requests_level", "log_requests_format",
        "log_requests_target", "uvicorn_access_log_exclude_prefixes", "crash_dump_folder", "show_time_cost",
        "enable_metrics", "smg_http_sidecar_port", "enable_mfu_metrics", "enable_metrics_for_all_schedulers",
        "load_snapshot_publish_interval", "tokenizer_metrics_custom_labels_header",
        "tokenizer_metrics_allowed_custom_labels", "extra_metric_labels", "bucket_time_to_first_token",
        "bucket_inter_token_latency", "bucket_e2e_request_latency", "prompt_tokens_buckets",
        "generation_tokens_buckets", "gc_warning_threshold_secs", "decode_log_interval",
        "enable_request_time_stats_logging", "kv_events_config", "load_publish_endpoint",
        "enable_forward_pass_metrics", "forward_pass_metrics_worker_id", "forward_pass_metrics_ipc_name",
        "enable_trace", "trace_modules", "otlp_traces_endpoint", "otlp_service_name", "export_metrics_to_file",
        "export_metrics_to_file_dir", "stat_loggers",
    }),
})  # fmt: skip
"""Who reads them."""

SERVED = frozenset[str]().union(*SERVED_BY.values())
