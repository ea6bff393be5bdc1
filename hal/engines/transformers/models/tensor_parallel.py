"""transformers' plans of tensor parallelism, as the ways in which hal's layers are split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from hal.nn import Share

COLWISE, ROWWISE, GATHERED = "colwise", "rowwise", "colwise_gather_output"
EXPERTS = ("moe_tp_experts", "packed_colwise")
"""The styles of experts, which hal's experts split in the same way."""
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "replicate")
"""The styles of layers that each rank has whole, or that hal splits in its own way."""


def plan_of(model: Any) -> dict[str, str]:
    """Return the style of each layer and tensor that the plan names, by its path."""
    patterns = {
        re.compile(re.escape(path).replace(r"\*", r"[^.]+") + "$"): style
        for path, style in (model.tp_plan or {}).items()
    }
    paths = [*(path for path, _ in model.named_modules()), *(path for path, _ in model.named_parameters())]
    return {path: style for path in paths for pattern, style in patterns.items() if pattern.match(path)}


def sharding(style: str | None, path: str, layer: nn.Linear, head_dim: int, *, head: bool) -> dict[str, Any]:
    """Return the arguments of hal's projection that split it as the plan says.

    Args:
        style: the plan's style of the layer, or None.
        path: the layer's path.
        layer: transformers' layer.
        head_dim: elements of a key head, which stay together in attention.
        head: whether the layer computes the logits.
    """
    if head:
        return {"shard": "out_features", "share": Share(pad=True), "gather": True} if style == GATHERED else {}
    if style not in (COLWISE, ROWWISE):
        return {}
    size = layer.out_features if style == COLWISE else layer.in_features
    in_heads = "mlp" not in path and "feed_forward" not in path and size % head_dim == 0
    share = Share(head_dim, repeat=style == COLWISE) if in_heads else Share()
    return {"shard": "out_features" if style == COLWISE else "in_features", "share": share}


def refusal(plan: Mapping[str, str], head: str) -> str | None:
    """Return why hal cannot split a model by a plan, or None.

    Args:
        plan: from :func:`plan_of`.
        head: the path of the layer that computes the logits.
    """
    if not any(style in (COLWISE, ROWWISE) for style in plan.values()):
        return "transformers has no plan for it"
    known = (COLWISE, ROWWISE, *EXPERTS, *WHOLE)
    for path, style in plan.items():
        if style not in known and not (style == GATHERED and path == head):
            return f"transformers' plan splits {path} by {style}, which no layer of hal's does"
    return None
