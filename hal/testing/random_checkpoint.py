"""Checkpoints of small models with random weights, one per family."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEAD_DIM = 64
"""Preferred head dimension; a backend that does not support it gets the nearest supported one."""
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}
"""Family name, as in case names, to the keys of config.json in addition to :data:`COMMON`."""

DISTANCE = 0.1
"""Difference of the experts of a layer from each other, relative to their weights."""
_EXPERT = re.compile(r"\.experts\.\d+")

_folders: list[TemporaryDirectory[str]] = []


@lru_cache(maxsize=16)
def checkpoint(family: str, head_dim: int = HEAD_DIM) -> Path:
    """Return the folder of a family's checkpoint, created once per process with a fixed seed.

    Every floating-point dtype represents the weights exactly, so that all dtypes compute with equal weights.
    """
    config = COMMON | FAMILIES[family] | {"head_dim": head_dim}
    folder = TemporaryDirectory(prefix=f"hal-conformance-{family}-")
    _folders.append(folder)
    path = Path(folder.name)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(len(family))
    weights = {name: _drawn(name, shape, generator) for name, shape in tensor_shapes(config)}
    save_file(weights, str(path / "model.safetensors"))
    return path


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if ".experts." in name:
        # Rounding may change the choice between two experts of nearly equal scores. Similar experts keep the effect on
        # the logits near that of rounding.
        same = torch.Generator().manual_seed(zlib.crc32(_EXPERT.sub("", name).encode()))
        noise = torch.randn(shape, generator=same) + DISTANCE * noise
    if name.endswith("bias"):
        values = noise * 0.5
    elif len(shape) == 1:  # norm weights are near 1; query norms are near 2, so that attention is not uniform
        values = (2.0 if name.endswith("q_norm.weight") else 1.0) + 0.1 * noise
    else:
        values = noise * shape[1] ** -0.5 * (2.0 if name.endswith("q_proj.weight") else 1.0)
    return (values * 64).round() / 64 if len(shape) == 1 else values.bfloat16().half().float()


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of a checkpoint with this config.json."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (width,)
        for part, rows, columns in (
            ("q_proj", queries, width),
            ("k_proj", keys, width),
            ("v_proj", keys, width),
            ("o_proj", width, queries),
        ):
            yield f"{prefix}.self_attn.{part}.weight", (rows, columns)
            if config["attention_bias"]:
                yield f"{prefix}.self_attn.{part}.bias", (rows,)
        if config["model_type"].startswith("qwen3"):
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{norm}.weight", (head,)
        if "num_experts" not in config or layer in config.get("mlp_only_layers", ()):
            yield from _mlp(f"{prefix}.mlp", width, inner)
            continue
        yield f"{prefix}.mlp.gate.weight", (config["num_experts"], width)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", width, config["moe_intermediate_size"])
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def _mlp(prefix: str, width: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, rows, columns in (("gate_proj", inner, width), ("up_proj", inner, width), ("down_proj", width, inner)):
        yield f"{prefix}.{part}.weight", (rows, columns)
