"""Writes small random checkpoints in the format of published ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from hal.testing.random_checkpoint import tensor_shapes

INDEX = "model.safetensors.index.json"
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
"""Overrides for a Qwen3-MoE."""
LARGE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
}
"""Overrides for a model whose steps take longer than the Python around them."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": 0,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}


def random_checkpoint(folder: Path, *, shards: int = 1, seed: int = 0, **overrides: Any) -> Path:
    """Write a Qwen3 with random weights into the new folder ``folder``; return it.

    Args:
        folder: the folder for config.json, the weights, tokenizer.json and generation_config.json.
        shards: number of weight files; more than one have an index.
        seed: seed of the weights.
        overrides: keys of config.json. The weights' shapes follow them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer()
    config = {**CONFIG, "vocab_size": tokenizer.get_vocab_size(), **overrides}
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write_weights(folder, random_weights(config, seed), shards)
    return folder


def random_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Return the tensors of a model of this config, by checkpoint name."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])

    def draw(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        # Norms are near one; a projection preserves the magnitude of its input.
        return (1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5).to(dtype)

    return {name: draw(shape) for name, shape in tensor_shapes(config)}


def write_weights(folder: Path, weights: dict[str, Tensor], shards: int = 1) -> None:
    """Write safetensors: one file, or ``shards`` files with an index."""
    if shards == 1:
        save_file(weights, str(folder / "model.safetensors"))
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, str(folder / file))
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def first_layers(checkpoint: Path, folder: Path, layers: int = 2) -> Path:
    """Write the first layers of a checkpoint into a new folder in ``folder``; return the new folder."""
    made = folder / checkpoint.name
    shutil.copytree(checkpoint, made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    types = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    write_json(made / "config.json", {**config, "num_hidden_layers": layers, **types})
    kept = {
        name: tensor
        for name, tensor in load_file(made / "model.safetensors").items()
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name)) or int(layer[1]) < layers
    }
    save_file(kept, made / "model.safetensors")
    return made


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` as JSON."""
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")


def trained_tokenizer() -> Tokenizer:
    """Return a byte-level BPE with a few merges; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the rat sat on the hat", "é 日本 🙂 é 日本 🙂"], trainer)
    return tokenizer


TEMPLATE = (
    "{% for m in messages %}{{ '# ' ~ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
    "{% for tool in tools or [] %}{{ '# ' ~ tool.function.name ~ '\n' }}{% endfor %}"
    "{% if shout %}# !\n{% endif %}{% if add_generation_prompt %}def {% endif %}"
)
"""A chat template with a switch."""


def with_template(checkpoint: Path, folder: Path) -> Path:
    """Return a new folder with a checkpoint and a chat template."""
    folder.mkdir()
    for each in checkpoint.iterdir():
        if each.name not in ("tokenizer_config.json", "generation_config.json"):
            (folder / each.name).symlink_to(each)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": TEMPLATE})
    return folder
