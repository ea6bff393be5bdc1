"""Configurations of models that are often measured; ``hal/checkpoint/random_weights.py`` generates their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

_QWEN3_MOE: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_HYBRID: dict[str, Any] = {
    "dtype": "bfloat16",
    "head_dim": 256,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}
_TINY: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    # Qwen3-4B has 36 such layers.
    "qwen3-4b-8-layers": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "qwen3-235b-a22b": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    # Qwen3-30B-A3B has 48 such layers, which need 57 GiB.
    "qwen3-30b-a3b-4-layers": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    },
    # gpt-oss-20b has 24 such layers, which need 39 GiB in bfloat16.
    "gpt-oss-20b-4-layers": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    # Qwen3-Next-80B-A3B has 48 layers, which need 148 GiB: three recurrent ones to one with attention.
    "qwen3-next-80b-a3b-4-layers": _HYBRID
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": _HYBRID
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    # No existing models: small, for trying the command.
    "tiny-experts": _QWEN3_MOE | _TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "tiny": _QWEN3 | _TINY,
    "tiny-hybrid": _HYBRID
    | _TINY
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
"""config.json by name."""
