"""The architectures of GGUF files that hal reads: config.json's keys and the names of tensors, in one table.

Source: the converters of llama.cpp, which write the files, and its models, which say what a missing key means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from hal.checkpoint.gguf.gguf_header import GgufHeader, GgufTensor
from hal.checkpoint.gguf.metadata import Metadata, rope_scaling
from hal.errors import CheckpointError, listed

Config = dict[str, Any]
BLOCK = re.compile(r"blk\.(\d{1,5})\.(.+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
DENSE = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
SPARSE = {
    **DENSE,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED = {
    **SPARSE,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.w1",
    "ffn_up_exps": "mlp.experts.{}.w3",
    "ffn_down_exps": "mlp.experts.{}.w2",
}
SANDWICH = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = 1 << 12
"""The most experts of a layer."""
INERT = (".vocab_size", ".attention.value_length", ".rope.scaling.finetuned", ".expert_count", ".expert_used_count")
"""Keys that say what the tensors say, too, or that only those read who have experts."""


@attrs.frozen
class Family:
    """How files of an architecture are read.

    Attributes:
        architecture: the architecture in config.json.
        model_type: the ``model_type`` in config.json, which other libraries read.
        names: the modules of a layer, by the names in the file. A ``{}`` is the number of an expert.
        config: returns the keys of config.json beside those that all families have.
        interleaved: whether the rows of query and key are in the order of adjacent pairs, and not of halves.
        norm_offset: what the file's weights of norms have more than the checkpoint's.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str]
    config: Callable[[Metadata, GgufHeader], Config] = lambda metadata, file: {}
    interleaved: bool = False
    norm_offset: float = 0.0


def _llama(metadata: Metadata, file: GgufHeader) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _mixtral(metadata: Metadata, file: GgufHeader) -> Config:
    return {
        "num_local_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
    }


def _experts(metadata: Metadata, file: GgufHeader) -> Config:
    return {
        "num_experts": metadata.integer(".expert_count"),
        "num_experts_per_tok": metadata.integer(".expert_used_count"),
        "moe_intermediate_size": metadata.integer(".expert_feed_forward_length"),
        # llama.cpp's model of each family decides, and older files have no key.
        "norm_topk_prob": metadata.flag(".expert_weights_norm", metadata.architecture == "qwen3moe"),
    }


def _shared_expert(metadata: Metadata, file: GgufHeader) -> Config:
    shared = metadata.integer(".expert_shared_feed_forward_length")
    return {**_experts(metadata, file), "shared_expert_intermediate_size": shared}


def _gemma3(metadata: Metadata, file: GgufHeader) -> Config:
    layers, heads = metadata.integer(".block_count"), metadata.integer(".attention.head_count")
    head_dim = metadata.integer(".attention.key_length")
    found: Config = {
        "sliding_window": metadata.integer(".attention.sliding_window"),
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10000.0),
        # The model of 27 billion parameters, which alone has 62 layers, scales by the width of a head's share.
        "query_pre_attn_scalar": metadata.integer(".embedding_length") // heads if layers == 62 else head_dim,
    }
    if ".final_logit_softcapping" in metadata:
        found["final_logit_softcapping"] = metadata.number(".final_logit_softcapping")
    if (key := ".attention.sliding_window_pattern") in metadata:
        if isinstance(metadata.raw(key), list):
            slides = metadata.array(key, bool)
            found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]
        else:
            found["sliding_window_pattern"] = metadata.integer(key)
    return found


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", DENSE, _llama, interleaved=True),
    "mixtral": Family("MixtralForCausalLM", "mixtral", MIXTRAL, _mixtral, interleaved=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", DENSE),
    "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", SHARED, _shared_expert),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", DENSE),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", SPARSE, _experts),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", SANDWICH, _gemma3, norm_offset=1.0),
}
"""By ``general.architecture``; a llama with experts is a Mixtral."""


@attrs.frozen
class Source:
    """A tensor of a checkpoint: a tensor of a file, or one expert's part of it.

    Attributes:
        shape: its shape in the checkpoint.
        first: its first row, if the file's tensor is a matrix of all rows.
        heads: the number of heads whose rows are in the order of adjacent pairs; 0 if the order is the checkpoint's.
        offset: what is added to the file's values.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    first: int = 0
    heads: int = 0
    offset: float = 0.0


def read_family(file: GgufHeader, metadata: Metadata) -> tuple[Config, dict[str, Source]]:
    """Return the keys of config.json that a file's metadata mean, and its tensors by their names in a checkpoint.

    Raises:
        CheckpointError: hal does not read files of the architecture, or a key is missing, invalid or unknown.
    """
    if (kind := metadata.text("general.type", "model")) != "model":
        raise CheckpointError(
            f"{file.path} is no model: its general.type is {kind!r:.40}",
            "give the file of the model that it belongs to",
        )
    name = metadata.architecture = metadata.text("general.architecture")
    if name not in FAMILIES:
        raise CheckpointError(
            f"{file.path} has the architecture {name!r:.60}, which hal does not read from GGUF files; "
            f"{listed(FAMILIES)}",
            "use the model's safetensors files, if `hal.models` has its family",
        )
    sparse = metadata.integer(".expert_count", 0) > 0
    family = FAMILIES["mixtral" if name == "llama" and sparse else name]
    config = _config(family, metadata, file)
    for key in INERT:
        metadata.read.add(metadata.full(key))
    if unread := metadata.unread():
        raise CheckpointError(
            f"{file.path} has the key {unread[0]!r:.80}, which hal does not read, and which may change what the model "
            "computes",
            "use the model's safetensors files",
        )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, Source] = {}
    for stored, tensor in file.tensors.items():
        for spelled, source in _sources(stored, tensor, family, heads if family.interleaved else {}):
            if spelled in found:
                raise CheckpointError(
                    f"{file.path} has two tensors that are {spelled!r:.80}", "download the file again"
                )
            if stored != ROPE_FACTORS:
                found[spelled] = source
    return config, found


def _config(family: Family, metadata: Metadata, file: GgufHeader) -> Config:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight", "give the file of a whole model")
    width, heads = metadata.integer(".embedding_length"), metadata.integer(".attention.head_count")
    head_dim = metadata.integer(".attention.key_length", width // max(heads, 1))
    rotated = metadata.integer(".rope.dimension_count", head_dim)
    layers = metadata.integer(".block_count")
    blocks = {int(block[1]) for each in file.tensors if (block := BLOCK.fullmatch(each))}
    if layers != len(blocks) or max(blocks, default=-1) >= layers:
        raise CheckpointError(
            f"{file.path} declares {layers} layers, and has the tensors of {len(blocks)}", "download the file again"
        )
    found: Config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": _dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": metadata.integer(".feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(".attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(".context_length"),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(".rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **family.config(metadata, file),
    }
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / max(head_dim, 1)
    if scaling := rope_scaling(metadata, file.tensors.get(ROPE_FACTORS), rotated, found["rope_theta"]):
        found["rope_scaling"] = scaling
    return found


def _dtype(file: GgufHeader) -> str:
    """Return the dtype of most values, bfloat16 for quantized ones: such models were trained in it."""
    sizes: dict[str, int] = {}
    for each in file.tensors.values():
        if len(each.shape) > 1:
            sizes[each.type.dtype] = sizes.get(each.type.dtype, 0) + each.numel
    most = max(sizes, key=lambda each: sizes[each], default="F32")
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[most]


def _sources(stored: str, tensor: GgufTensor, family: Family, heads: Mapping[str, int]) -> list[tuple[str, Source]]:
    """Return the tensors of the checkpoint that a tensor of the file holds. An unknown one keeps its name."""
    found = BLOCK.fullmatch(stored)
    if found is None:
        name, _, kind = stored.rpartition(".")
        module, layer = OUTER.get(name), ""
    else:
        layer, name, kind = f"model.layers.{int(found[1])}.", found[2], found[3]
        module = family.names.get(name)
    if module is None:
        return [(stored, Source(tensor, tensor.shape))]
    offset = -family.norm_offset if name.endswith("norm") and kind == "weight" else 0.0
    if "{}" not in module:
        shape = (1, *tensor.shape) if module.endswith("shared_expert_gate") and len(tensor.shape) == 1 else tensor.shape
        return [(f"{layer}{module}.{kind}", Source(tensor, shape, heads=heads.get(name, 0), offset=offset))]
    if len(tensor.shape) != 3 or tensor.shape[0] > EXPERTS:
        return [(stored, Source(tensor, tensor.shape))]
    experts, rows, columns = tensor.shape
    return [
        (f"{layer}{module.format(each)}.{kind}", Source(tensor, (rows, columns), first=each * rows))
        for each in range(experts)
    ]
