"""Random configurations of families with recurrent layers, and their checkpoints, by Hugging Face transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.comparison import randomize, their_model

transformers = pytest.importorskip("transformers", reason="transformers is the reference")

FAMILIES = ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "KimiLinear", "Glm5Next", "DeepseekV4", "Qwen4ExpText")
SIZES: dict[str, Any] = {"vocab_size": 61, "max_position_embeddings": 512, "attn_implementation": "eager"}


def draw_config(family: str, seed: int, **changes: Any) -> Any:
    """Draw a configuration of a family, and change some keys."""
    draw = random.Random(f"{family} {seed}")
    if family == "KimiLinear":
        return transformers.KimiLinearConfig(**_kimi(draw) | changes)
    if family == "Glm5Next":
        return transformers.Glm5NextConfig(text_config=_glm(draw) | changes, vision_config=_TOWER)
    if family == "DeepseekV4":
        return transformers.DeepseekV4Config(**_v4(draw) | changes)
    kv_heads, key_heads = draw.choice((1, 2)), draw.choice((1, 2))
    layers = draw.randint(2, 4)
    # transformers needs one layer of each type.
    types = ["full_attention", "linear_attention"]
    types += [draw.choice(types) for _ in range(layers - 2)]
    draw.shuffle(types)
    given = {
        **SIZES,
        "hidden_size": draw.choice((32, 48)),
        "num_hidden_layers": layers,
        "layer_types": types if layers < 4 or draw.random() < 0.5 else None,
        "num_attention_heads": kv_heads * draw.choice((1, 2)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((16, 32)),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw.choice((100.0, 1e4)),
            "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0)),
        },
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "linear_key_head_dim": draw.choice((8, 16, 24)),
        "linear_value_head_dim": draw.choice((8, 16, 20)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 2, 3)),
    }
    if family != "Qwen3_5MoeText":
        given["intermediate_size"] = draw.choice((40, 56))
    if family != "Qwen3_5Text":
        experts = draw.choice((4, 8))
        given |= {
            "num_experts": experts,
            "num_experts_per_tok": draw.randint(1, experts // 2),
            "moe_intermediate_size": draw.choice((16, 24)),
            "shared_expert_intermediate_size": draw.choice((16, 24)),
        }
    if family == "Qwen4ExpText":
        given |= _qwen4(draw, given["layer_types"] or ["linear_attention"])
    if family == "Qwen3Next":
        given |= {"decoder_sparse_step": draw.choice((1, 2)), "norm_topk_prob": draw.random() < 0.5}
        given["mlp_only_layers"] = [draw.randrange(layers)] if draw.random() < 0.5 else []
    return getattr(transformers, f"{family}Config")(**given | changes)


def _kimi(draw: random.Random) -> dict[str, Any]:
    """Draw the keys of Kimi-Linear."""
    layers, heads = draw.randint(2, 4), draw.choice((1, 2, 4))
    # transformers needs one layer of each type.
    types = ["full_attention", "linear_attention"]
    types += [draw.choice(types) for _ in range(layers - 2)]
    draw.shuffle(types)
    experts = draw.choice((4, 8))
    return {
        **SIZES,
        "pad_token_id": 0,
        "hidden_size": draw.choice((32, 48)),
        "intermediate_size": draw.choice((40, 56)),
        "num_hidden_layers": layers,
        "layer_types": types,
        "mlp_layer_types": None if draw.random() < 0.5 else [draw.choice(("dense", "sparse")) for _ in types],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice((None, 24)),
        "kv_lora_rank": draw.choice((16, 32)),
        "qk_nope_head_dim": draw.choice((16, 24)),
        "qk_rope_head_dim": draw.choice((8, 16)),
        "v_head_dim": draw.choice((16, 40)),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts // 2),
        "moe_intermediate_size": draw.choice((16, 24)),
        "n_shared_experts": draw.choice((1, 2)),
        "n_group": draw.choice((1, 2)),
        "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "linear_head_dim": draw.choice((8, 16, 24)),
        "linear_num_heads": draw.choice((1, 2, 4)),
    }


_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 1,
    "out_hidden_size": 16,
    "intermediate_size": 16,
    "projection_intermediate_size": 16,
}


def _glm(draw: random.Random) -> dict[str, Any]:
    """Draw the keys of GLM-5.3-Flash's text model. A layer with attention may share the selection of that before it."""
    given, pool = _kimi(draw), draw.choice((1, 2, 4, 16))
    types, shares = given["layer_types"], ["full"] * given["num_hidden_layers"]
    if draw.random() < 0.5:
        types += ["indexed_attention"] * 2
        shares += ["full", "shared"]
    for key in ("num_local_experts", "qk_rope_head_dim"):
        del given[key]
    return {
        **given,
        "num_hidden_layers": len(types),
        "mlp_layer_types": [draw.choice(("dense", "sparse")) for _ in types],
        "indexer_types": shares,
        "n_routed_experts": 8,
        "q_lora_rank": draw.choice((16, 24)),
        "swiglu_limit": draw.choice((0.5, 10.0)),
        "linear_lower_bound": draw.choice((None, -5.0, -0.5)),
        "index_kpool": pool,
        "index_topk": pool * draw.choice((1, 3, 100)),
        "index_n_heads": 24,  # of few, all may be negative, so that scores of 0 tie
        "index_head_dim": draw.choice((16, 32)),
        "hc_mult": draw.choice((2, 4)),
        "hc_eps": draw.choice((1e-6, 1e-2)),
        "hc_sinkhorn_iters": draw.choice((1, 5)),
    }


def _v4(draw: random.Random) -> dict[str, Any]:
    """Draw the keys of DeepSeek-V4, whose layers keep entries of groups, and the tokens of an incomplete one."""
    kinds = ("compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention")
    layers, groups, experts = draw.randint(3, 5), draw.choice((1, 2, 4)), draw.choice((4, 8))
    types = [*kinds, *draw.choices(kinds, k=layers - 3)]
    draw.shuffle(types)
    head_dim, rope = draw.choice((24, 32)), {"rope_type": "default"}
    if draw.random() < 0.5:
        rope = {"rope_type": "yarn", "factor": draw.choice((2.0, 8.0)), "original_max_position_embeddings": 32}
    return {
        **SIZES,
        "hidden_size": draw.choice((32, 48)),
        "num_hidden_layers": layers,
        "layer_types": types,
        "mlp_layer_types": [draw.choice(("hash_moe", "moe")) for _ in types],
        "compress_rates": {kinds[0]: draw.choice((1, 4, 8)), kinds[1]: draw.choice((2, 8, 16))},
        "num_attention_heads": groups * draw.choice((1, 2)),
        "head_dim": head_dim,
        "partial_rotary_factor": draw.choice((8, 16)) / head_dim,
        "rope_theta": draw.choice((100.0, 1e4)),
        "compress_rope_theta": draw.choice((1e3, 1e5)),
        "rope_parameters": rope,
        "q_lora_rank": draw.choice((16, 24)),
        "o_groups": groups,
        "o_lora_rank": draw.choice((8, 12)),
        "sliding_window": draw.choice((1, 5, 30)),
        "index_topk": draw.choice((1, 3, 100)),  # less than most contexts, or more than all
        "index_n_heads": 24,  # of few, all may be negative, so that scores of 0 tie
        "index_head_dim": draw.choice((16, 32)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts // 2),
        "moe_intermediate_size": draw.choice((16, 24)),
        "swiglu_limit": draw.choice((0.5, 10.0)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "hc_mult": draw.choice((2, 4)),
        "hc_eps": draw.choice((1e-6, 1e-2)),
        "hc_sinkhorn_iters": draw.choice((1, 5)),
    }


def _qwen4(draw: random.Random, types: list[str]) -> dict[str, Any]:
    """Draw the keys that Qwen3.8-Flash-Next has beside those of Qwen3.5."""
    group, longest, heads = draw.choice((1, 2, 4, 16)), draw.choice((2, 3, 4)), draw.choice((1, 2, 4))
    recurrent = [number for number, each in enumerate(types, 1) if each == "linear_attention"]
    return {
        "output_gate_type": draw.choice((None, "sigmoid", "silu")),
        "hc_count": draw.choice((2, 3, 4)),
        "hc_lowrank": draw.choice((4, 12)),
        "indexer_n_heads": 24,  # of few, all may be negative, so that scores of 0 tie
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": group * draw.choice((1, 3, 100)),  # less than most contexts, or more than all
        "indexer_compress_ratio": group,
        "ple_layer_ids": draw.sample(recurrent, draw.randint(0, len(recurrent))),
        "ple_embed_dim": (longest - 1) * heads * draw.choice((4, 8)),
        "ple_conv_kernel_size": draw.choice((2, 4)),
        "ngram_size": longest,
        "heads_per_ngram": heads,
        "ngram_vocab_size_base": draw.choice((20, 100)),
        "make_ngram_vocab_size_divisible_by": draw.choice((1, 16)),
        "split_ngram_parts": draw.choice((1, 4)),
        "eos_token_id": draw.choice((5, [7, 8])),
    }


def build(folder: Path, family: str, seed: int, **changes: Any) -> Any:
    """Write a random checkpoint, and return its model in transformers."""
    model = their_model(draw_config(family, seed, **changes))
    randomize(model, seed)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # some heads remember for long, others hardly
            parameter.data.copy_(torch.linspace(-4, 2, parameter.numel()).view_as(parameter))
    model.save_pretrained(folder)
    return model
