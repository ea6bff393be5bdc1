"""Writes a random Qwen3 or Qwen3-MoE checkpoint of any size for benchmarks. The values are meaningless."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write(folder: Path, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> int:
    """Write the checkpoint; return the size of its weights in bytes."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    } | overrides
    hidden, head = config["hidden_size"], config["head_dim"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (config["num_attention_heads"] * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (config["num_key_value_heads"] * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (config["num_key_value_heads"] * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, config["num_attention_heads"] * head),
            f"{prefix}.self_attn.q_norm.weight": (head,),
            f"{prefix}.self_attn.k_norm.weight": (head,),
        }
        experts = [f"{prefix}.mlp"]
        if "num_experts" in config:
            shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
            experts = [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
        for each in experts:
            shapes |= {
                f"{each}.gate_proj.weight": (inner, hidden),
                f"{each}.up_proj.weight": (inner, hidden),
                f"{each}.down_proj.weight": (hidden, inner),
            }
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = {
        name: torch.ones(shape, dtype=dtype) if len(shape) == 1 else _repeated(noise, shape)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def _repeated(noise: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return values of one deviation. To draw each anew takes longer than the tests that load them."""
    count = math.prod(shape)
    return noise.repeat(-(-count // len(noise)))[:count].view(shape) * shape[-1] ** -0.5
