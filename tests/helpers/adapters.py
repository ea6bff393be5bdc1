"""Random adapters as PEFT saves them, and models of transformers with adapters merged into their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def adapter_of(
    model: nn.Module | Mapping[str, Tensor],
    folder: Path,
    targets: Collection[str] = ALL,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    rooted: bool = False,
    seed: int = 0,
    **config: Any,
) -> dict[str, Tensor]:
    """Write an adapter that changes a model much, and return what it adds to each weight, by module.

    Args:
        model: of transformers, or the weights of a checkpoint.
        targets: the last parts of the names of its projections.
        config: further keys of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors, updates = dict[str, Tensor](), dict[str, Tensor]()
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    for name, inputs, outputs in _projections(model):
        kind = name.rpartition(".")[2]
        if kind not in targets:
            continue
        own = ranks.get(kind, rank)
        a = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, own, generator=generator) * own**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        updates[name] = alphas.get(kind, alpha) / (math.sqrt(own) if rooted else own) * (b @ a)
    assert tensors, "no module has such a name"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "use_rslora": rooted,
        "use_dora": False,
        "bias": "none",
        "modules_to_save": None,
        "target_modules": sorted(targets),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return updates


@contextmanager
def merged(model: nn.Module, updates: Mapping[str, Tensor]) -> Iterator[None]:
    """Add updates to a model's weights in a block."""
    modules, before = dict(model.named_modules()), dict[str, Tensor]()
    with torch.no_grad():
        for name, update in updates.items():
            weight: Any = modules[name].weight
            before[name] = weight.clone()
            weight += update.t() if _transposed(modules[name]) else update
        try:
            yield
        finally:
            for name, values in before.items():
                held: Any = modules[name].weight
                held.copy_(values)


def _transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _projections(model: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, inputs and outputs of each projection."""
    if not isinstance(model, nn.Module):
        for name, weight in model.items():
            if weight.dim() == 2:
                yield name.removesuffix(".weight"), weight.shape[1], weight.shape[0]
        return
    for name, module in model.named_modules():
        held: Any = getattr(module, "weight", None)
        if isinstance(held, Tensor) and held.dim() == 2:
            outputs, inputs = reversed(held.shape) if _transposed(module) else held.shape
            yield name, inputs, outputs
