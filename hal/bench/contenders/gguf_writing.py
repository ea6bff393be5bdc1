"""Writing a checkpoint's weights as a GGUF file, for implementations that read no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hal.bench.bench_errors import BenchmarkError, need
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.gguf.families import FAMILIES, OUTER, Family
from hal.nn.rope_parameters import Llama3Rope, RopeParameters

KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of metadata by those of config.json."""


def write_gguf(checkpoint: Checkpoint, file: Path, kind: str) -> None:
    """Write the weights as a GGUF file without a tokenizer.

    Args:
        checkpoint: of a family in :data:`hal.checkpoint.gguf.families.FAMILIES` whose norms have no offset.
        file: the file to write.
        kind: a type of ``gguf.GGMLQuantizationType``, for matrices; vectors are float32.

    Raises:
        BenchmarkError: the package ``gguf`` is not installed, or the family or its rotary scaling is none of those.
    """
    gguf = need("gguf", "--against llama.cpp")
    config = checkpoint.config
    name, family = _family(checkpoint)
    writer = gguf.GGUFWriter(file, name)
    for key, spelled in KEYS.items():
        if config.get(key) is not None:
            writer.add_uint32(f"{name}.{spelled}", config[key])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = RopeParameters.from_config(config)
    writer.add_rope_freq_base(rope.rope_theta)
    writer.add_tokenizer_model("no_vocab")
    if isinstance(rope, Llama3Rope):
        device = torch.device("cpu")
        plain = RopeParameters(rope_theta=rope.rope_theta).inv_freq(head_dim, device)
        writer.add_tensor("rope_freqs.weight", (plain / rope.inv_freq(head_dim, device)).numpy())
    elif type(rope) is not RopeParameters or rope.partial_rotary_factor != 1:
        raise BenchmarkError(f"hal writes no GGUF file with rotary positions of {rope}", "omit --against llama.cpp")
    wanted = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[wanted][0]
    for stored, values in _tensors(checkpoint, family):
        chosen = wanted if values.ndim > 1 and values.shape[-1] % size == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quants.quantize(values.numpy(), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _family(checkpoint: Checkpoint) -> tuple[str, Family]:
    for name, family in FAMILIES.items():
        if family.architecture == checkpoint.architecture and not family.norm_offset and name != "mixtral":
            return name, family
    raise BenchmarkError(
        f"hal writes no GGUF file of {checkpoint.architecture}", "give the model's own GGUF file, or omit --against"
    )


def _tensors(checkpoint: Checkpoint, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the file in float32, under its names, with experts stacked and rows in its order."""
    config = checkpoint.config
    layers = range(config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {f"{module}.weight": f"{name}.weight" for name, module in OUTER.items()}
    names |= {
        f"model.layers.{layer}.{module}.{part}": f"blk.{layer}.{name}.{part}"
        for layer in layers
        for name, module in family.names.items()
        for part in ("weight", "bias")
    }
    missing = set(checkpoint.tensors)
    for source, stored in names.items():
        sources = [source.format(each) for each in range(config.get("num_experts", 0))] if "{}" in source else [source]
        if not missing.issuperset(sources):
            continue
        missing.difference_update(sources)
        values = torch.stack([each.float() for _, each in checkpoint.read(sources)])
        if "{}" not in source:
            values = values[0]
        if family.interleaved and (count := heads.get(stored.split(".")[-2])):
            values = values.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        yield stored, values
    if missing:
        raise BenchmarkError(
            f"a GGUF file has no name for {min(missing)}", "give the model's own GGUF file, or omit --against"
        )
