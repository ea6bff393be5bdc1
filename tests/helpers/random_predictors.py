"""Random checkpoints of a model and the layer that predicts its further tokens (MTP), and both in plain torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.comparison import randomize
from helpers.random_hybrids import build

FAMILIES = {"Qwen3NextMTP": "Qwen3Next", "Qwen3_5MTP": "Qwen3_5Text", "Qwen3_5MoeMTP": "Qwen3_5MoeText"}


class Reference(nn.Module):
    """The predictor in plain torch, of a decoder layer and norms of the target's classes."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        config, norm = target.config, type(target.model.norm)
        width = config.hidden_size
        self.layers = nn.ModuleList([type(target.model.layers[0])(config, config.layer_types.index("full_attention"))])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)

    def forward(self, target: Any, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        base, count = target.model, len(tokens)
        embedding = base.embed_tokens(torch.tensor(tokens))
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))[None]
        x = self.layers[0](
            x,
            position_embeddings=base.rotary_emb(x, torch.arange(count)[None]),
            attention_mask=torch.full((count, count), -math.inf).triu(1)[None, None],
        )
        x = self.norm(x[0])
        return x, target.lm_head(x)


def saved(folder: Path, architecture: str) -> tuple[Any, Reference]:
    """Write a checkpoint of a target and its predictor, and return both in transformers' classes."""
    sparse: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []} if "Next" in architecture else {}
    target = build(folder, FAMILIES[architecture], 1, **sparse)
    reference = Reference(target).eval()
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
