"""Writes checkpoints as GGUF files, as the converters of llama.cpp do, with the writer of the package ``gguf``."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from hal import Checkpoint

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)")
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
}
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Collection[str] = (),
    split: int = 0,
) -> Path:
    """Write a checkpoint as a GGUF file; return its path.

    Args:
        folder: the checkpoint in safetensors.
        file: the file to write.
        kind: the type of the matrices; vectors are float32. The values of K-quants, which the package does not write,
            are random.
        metadata: further metadata, or others, by key; None leaves a key out.
        tensors: further tensors, by the names in the file.
        without: the names of tensors to leave out.
        split: the most tensors in one file; 0 for a single one.
    """
    checkpoint = Checkpoint.open(folder)
    config, architecture = checkpoint.config, ARCHITECTURES[checkpoint.architecture]
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split)
    found = {f"{architecture}.{KEYS[key]}": config[key] for key in KEYS if config.get(key) is not None}
    if architecture != "gemma3":
        found.pop(f"{architecture}.attention.sliding_window", None)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found[f"{architecture}.rope.freq_base"] = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    found[f"{architecture}.attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    found |= vocabulary(checkpoint.tokenizer(), config["vocab_size"]) if checkpoint.has_tokenizer else {}
    for key, value in {**found, **(metadata or {})}.items():
        if value is not None:
            add(writer, key, value)
    stored = dict(
        _stored({name: each.float() for name, each in checkpoint.read(checkpoint.tensors)}, config, architecture)
    )
    quantization = gguf.GGMLQuantizationType[kind]
    for name, values in stored.items():
        if name in without:
            continue
        fits = len(values.shape) > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0] == 0
        chosen = quantization if fits else gguf.GGMLQuantizationType.F32
        blocks = random_blocks(values.shape, chosen) if kind.endswith("_K") else None
        writer.add_tensor(name, gguf.quants.quantize(values, chosen) if blocks is None else blocks, raw_dtype=chosen)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray | None:
    """Return random blocks with small scales, one of which is 0; None if the type has no blocks of 256."""
    if not kind.name.endswith("_K"):
        return None
    draw, (size, nbytes) = np.random.default_rng(shape[-1]), gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    scales = draw.uniform(0.5, 1, (2, *blocks.shape[:-1], 1)) / (32 * 32 * shape[-1] ** 0.5)
    for scale, start in zip(scales, (208,) if kind.name == "Q6_K" else (0, 2), strict=False):
        blocks[..., start : start + 2] = scale.astype(np.float16).view(np.uint8)
    if kind.name != "Q6_K":
        blocks[..., 0, 4:6] &= 0xC0
    return blocks.reshape(*shape[:-1], -1)


def vocabulary(tokenizer: Tokenizer, size: int) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer whose control tokens are its added ones."""
    content = json.loads(tokenizer.to_str())
    added = {each["id"]: each for each in content["added_tokens"]}
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    tokens = [names.get(index, f"[PAD{index}]") for index in range(size)]
    kinds = [3 if index in added else 1 if index in names else 5 for index in range(size)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value of metadata in the type that converters use."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _stored(tensors: Mapping[str, Tensor], config: Mapping[str, Any], architecture: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file, by its names and in its order of rows."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {**NAMES, **(SANDWICH if architecture == "gemma3" else {})}
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        values = tensor.numpy()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        if (layer := LAYER.fullmatch(name)) is None:
            module, _, kind = name.rpartition(".")
            found[f"{OUTER[module]}.{kind}"] = values
            continue
        number, module, kind = layer.groups()
        if (expert := EXPERT.fullmatch(module)) is not None:
            experts.setdefault(f"blk.{number}.{EXPERTS[expert[3]]}.{kind}", {})[int(expert[2])] = values
            continue
        if architecture == "llama" and (count := heads.get(names[module])):
            halves = values.reshape(count, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if module.endswith("shared_expert_gate"):
            values = values[0]
        found[f"blk.{number}.{names[module]}.{kind}"] = values
    return {**found, **{name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}}
