"""Random checkpoints of a model and the layer that predicts its further tokens (MTP, EAGLE-3), both in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.comparison import randomize
from helpers.random_hybrids import build

HYBRIDS = {"Qwen3NextMTP": "Qwen3Next", "Qwen3_5MTP": "Qwen3_5Text", "Qwen3_5MoeMTP": "Qwen3_5MoeText"}
NUMBERED = {f"{family}MTP": family for family in ("Glm4Moe", "DeepseekV3", "DeepseekV32", "GlmMoeDsa")}
FAMILIES = (*HYBRIDS, *NUMBERED)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
EXPERTS: dict[str, Any] = {
    **SIZES,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
INDEX = {"index_topk": 7, "index_n_heads": 8, "index_head_dim": 16}
"""With many heads, no two positions have a score of 0."""
NAMES = {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm."}
"""The names of a layer that is numbered like the model's, by those of Qwen3-Next."""


class Reference(nn.Module):
    """The predictor in plain torch, of a decoder layer and norms of the target's classes."""

    def __init__(self, target: Any, layer: int) -> None:
        super().__init__()
        config, norm = target.config, type(target.model.norm)
        width = config.hidden_size
        self.layers = nn.ModuleList([type(target.model.layers[0])(config, layer)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)

    def forward(self, target: Any, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = target.model.embed_tokens(torch.tensor(tokens))
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))[None]
        found = self.layers[0](x, **attending(target, x))
        x = self.norm((found[0] if isinstance(found, tuple) else found)[0])
        return x, target.lm_head(x)


class EagleReference(nn.Module):
    """A head of EAGLE-3 in plain torch, whose layer is one of transformers' Llama with wider inputs.

    Args:
        target: the model.
        layers: the layers whose inputs it reads.
        drafted: the tokens that it can draft, ascending; None for all.
    """

    def __init__(self, target: Any, layers: tuple[int, ...], drafted: Tensor | None) -> None:
        super().__init__()
        config, width = target.config, target.config.hidden_size
        own = transformers.LlamaConfig(**{key: getattr(config, key) for key in SIZES if key != "attn_implementation"})
        own.head_dim, own.rope_parameters, own._attn_implementation = config.head_dim, config.rope_parameters, "eager"
        self.midlayer = transformers.models.llama.modeling_llama.LlamaDecoderLayer(own, 0)
        attention, norm = self.midlayer.self_attn, type(self.midlayer.input_layernorm)
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = nn.Linear(2 * width, getattr(attention, name).out_features, bias=False)
            setattr(attention, name, wide)
        self.midlayer.hidden_norm, self.norm = (norm(width, eps=own.rms_norm_eps) for _ in range(2))
        self.fc = nn.Linear(len(layers) * width, width, bias=False)
        size = config.vocab_size if drafted is None else len(drafted)
        self.lm_head = nn.Linear(width, size, bias=False)
        self.layers, self.drafted, self.config = layers, drafted, own

    def start(self, target: Any, tokens: list[int]) -> Tensor:
        """Return what the first step reads of the target at each token."""
        found = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return self.fc(torch.cat([found[each][0] for each in self.layers], -1))

    def forward(self, target: Any, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        embedding = target.model.embed_tokens(torch.tensor(tokens))
        x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)], -1)[None]
        found = hidden + layer.self_attn(x, **attending(target, x))[0][0]
        found = found + layer.mlp(layer.post_attention_layernorm(found))
        logits = self.lm_head(self.norm(found))
        if self.drafted is None:
            return found, logits
        whole = logits.new_full((len(tokens), target.config.vocab_size), -math.inf)
        return found, whole.index_copy(1, self.drafted, logits)


def attending(target: Any, x: Tensor) -> dict[str, Any]:
    """Return the arguments of a layer of transformers for one whole sequence."""
    count = x.shape[1]
    mask = torch.full((count, count), -math.inf).triu(1)[None, None]
    angles = target.model.rotary_emb(x, torch.arange(count)[None])
    return {"position_embeddings": angles, "attention_mask": mask}


def saved(folder: Path, architecture: str) -> tuple[Any, Reference]:
    """Write a checkpoint of a target and its predictor, and return both in transformers' classes."""
    if architecture in NUMBERED:
        return _saved_numbered(folder, NUMBERED[architecture])
    sparse: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []} if "Next" in architecture else {}
    target = build(folder, HYBRIDS[architecture], 1, **sparse)
    reference = Reference(target, target.config.layer_types.index("full_attention")).eval()
    randomize(reference, 2)
    path = folder / "model.safetensors"
    tensors = load_file(path) | {f"mtp.{name}": each.clone() for name, each in reference.state_dict().items()}
    if architecture == "Qwen3_5MoeMTP":  # as in the published models, which also read images
        tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
        tensors["model.visual.blocks.0.norm.weight"] = torch.ones(4)
        text = json.loads((folder / "config.json").read_text())
        keys = {"architectures": ["Qwen3_5MoeForCausalLM"], "text_config": text}
        (folder / "config.json").write_text(json.dumps(keys))
    save_file(tensors, path)
    return target, reference


def _saved_numbered(folder: Path, family: str) -> tuple[Any, Reference]:
    """The predictor is behind the model's last layer, with copies of the embedding and the output projection."""
    own = {"head_dim": 16, "use_qk_norm": True} if family == "Glm4Moe" else LATENT
    index = INDEX if family in ("DeepseekV32", "GlmMoeDsa") else {}
    config = getattr(transformers, f"{family}Config")(**EXPERTS | own | index)
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(target, 1)
    target.save_pretrained(folder)
    reference = Reference(target, config.num_hidden_layers - 1).eval()
    randomize(reference, 2)
    path, own = folder / "model.safetensors", f"model.layers.{config.num_hidden_layers}."
    tensors = load_file(path)
    for name, each in reference.state_dict().items():
        for theirs, ours in {**NAMES, "layers.0.": "", "norm.": "shared_head.norm."}.items():
            if name.startswith(theirs):
                tensors[own + name.replace(theirs, ours, 1)] = each.clone()
                break
    tensors |= {
        f"{own}embed_tokens.weight": target.model.embed_tokens.weight.detach().clone(),
        f"{own}shared_head.head.weight": target.lm_head.weight.detach().clone(),
    }
    save_file(tensors, path)
    return target, reference


def saved_eagle(folder: Path, family: str = "Llama", *, whole: bool = False) -> tuple[Any, EagleReference]:
    """Write a target to ``folder / "target"`` and a head of EAGLE-3 to ``folder / "head"``, and return both.

    Args:
        folder: where to write.
        family: the target's in transformers.
        whole: whether the head drafts the whole vocabulary, reads the layers of the default, and has an embedding.
    """
    config = getattr(transformers, f"{family}Config")(**SIZES | {"head_dim": 16, "num_hidden_layers": 7})
    target = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(target, 1)
    target.save_pretrained(folder / "target")
    count = config.num_hidden_layers
    layers = (2, count // 2, count - 3) if whole else (1, 2, 6)
    drafted = None if whole else torch.randperm(61, generator=torch.Generator().manual_seed(5))[:40].sort().values
    reference = EagleReference(target, layers, drafted).eval()
    randomize(reference, 2)
    tensors = {name: each.clone() for name, each in reference.state_dict().items()}
    written = {**reference.config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    if drafted is None:
        tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    else:
        tensors |= {"d2t": drafted - torch.arange(40), "t2d": torch.isin(torch.arange(61), drafted)}
        written |= {"draft_vocab_size": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    (folder / "head").mkdir()
    save_file(tensors, folder / "head" / "model.safetensors")
    (folder / "head" / "config.json").write_text(json.dumps(written, default=str))
    return target, reference
