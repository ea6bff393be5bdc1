"""The config.json of published models with recurrent layers, with their keys and choices, and with small sizes."""

from __future__ import annotations

from typing import Any

LAYERS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 262144,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 96,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 24,
}
QWEN3_5: dict[str, Any] = {
    **LAYERS,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
IMAGES: dict[str, Any] = {
    "image_token_id": 90,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 91,
    "vision_end_token_id": 92,
    "vision_start_token_id": 93,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B-Instruct": {
        **LAYERS,
        **EXPERTS,
        "architectures": ["Qwen3NextForCausalLM"],
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "intermediate_size": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_sliding_window": False,
    },
    "Qwen3.5-0.8B": {
        **IMAGES,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**QWEN3_5, "intermediate_size": 48, "model_type": "qwen3_5_text"},
        "vision_config": {**VISION, "model_type": "qwen3_5"},
    },
    "Qwen3.5-35B-A3B": {
        **IMAGES,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {**QWEN3_5, **EXPERTS, "model_type": "qwen3_5_moe_text"},
        "vision_config": {**VISION, "model_type": "qwen3_5_moe"},
    },
}
"""By name."""
