"""Writes a checkpoint that engines for NPUs can run: python checkpoint.py sparse|latent FOLDER.

- sparse: checkpoints/tiny-python-moe for SGLang's Qwen3-MoE, which reads neither ``tie_word_embeddings`` nor
  ``mlp_only_layers``. The MLP of a dense layer becomes each of its experts, whose weights add up to 1.
- latent: a DeepSeek-V3 from checkpoints/tiny-python-latent. It leaves out the index, which chooses all positions of a
  text of up to 64 tokens. The heads get the number and sizes of which CANN's attention has kernels. Padding them with
  zeros changes no result, and the queries make up for the scale, which is that of the padded size.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

HEADS, SIZE = 8, 128


def padded(rows: Tensor, heads: int, sizes: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Return the rows ``[heads * sum(sizes), columns]`` for more heads, whose two parts have the wanted sizes."""
    parts = rows.unflatten(0, (heads, -1)).split(sizes, dim=1)
    wide = [pad(part, (0, 0, 0, size - part.shape[1])) for part, size in zip(parts, wanted, strict=True)]
    return pad(torch.cat(wide, dim=1), (0, 0, 0, 0, 0, HEADS - heads)).flatten(0, 1)


def sparse(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Give the dense layers of a Qwen3-MoE experts, and all experts the size of their MLP."""
    size, experts = config["intermediate_size"], range(config["num_local_experts"])
    for name, each in weights.items():
        if ".experts." in name:
            short = size - config["moe_intermediate_size"]
            weights[name] = pad(each, (0, short) if ".down_proj." in name else (0, 0, 0, short))
    for layer in config["mlp_only_layers"]:
        mlp = f"model.layers.{layer}.mlp"
        for name in ("gate_proj", "up_proj", "down_proj"):
            dense = weights.pop(f"{mlp}.{name}.weight")
            weights |= {f"{mlp}.experts.{expert}.{name}.weight": dense.clone() for expert in experts}
        weights[f"{mlp}.gate.weight"] = dense.new_zeros(len(experts), config["hidden_size"])
    config |= {"mlp_only_layers": [], "moe_intermediate_size": size}


def latent(config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Change the keys and weights of a DeepSeek-V3.2 to those of a DeepSeek-V3 with other heads."""
    heads, rope = config["num_attention_heads"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    for layer in range(config["num_hidden_layers"]):
        query, latent, output = (f"model.layers.{layer}.self_attn.{name}_proj.weight" for name in ("q_b", "kv_b", "o"))
        scale = math.sqrt((SIZE + rope) / (nope + rope))
        weights[query] = padded(weights[query] * scale, heads, (nope, rope), (SIZE, rope))
        weights[latent] = padded(weights[latent], heads, (nope, value), (SIZE, SIZE))
        weights[output] = padded(weights[output].T, heads, (value, 0), (SIZE, 0)).T.contiguous()
    for each in [*filter(re.compile(r".*\.indexer\.").match, weights)]:
        del weights[each]
    for each in ("index_head_dim", "index_n_heads", "index_topk", "layer_types"):
        del config[each]
    config |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "qk_nope_head_dim": SIZE,
        "qk_head_dim": SIZE + rope,
        "v_head_dim": SIZE,
    }


def main() -> None:
    """Copy a checkpoint, with other keys and weights."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    source = Path("checkpoints", {"sparse": "tiny-python-moe", "latent": "tiny-python-latent"}[name])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = load_file(source / "model.safetensors")
    {"sparse": sparse, "latent": latent}[name](config, weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    config["tie_word_embeddings"] = False
    shutil.copytree(source, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
