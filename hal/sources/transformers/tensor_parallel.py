"""transformers' plans of tensor parallelism, as the ways in which hal's layers are split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hal.nn import Attention, Linear, Share, Weight
from hal.parallel import Group

COLWISE, ROWWISE, GATHERED = "colwise", "rowwise", "colwise_gather_output"
PARTED = "rowwise_split_input"
"""The style of a layer that takes its part of an input that each rank has whole."""
PARAMETERS = "local_params"
"""The style of a layer whose own parameters ranks split by heads."""
EXPERTS = ("moe_tp_experts", "packed_colwise")
"""The styles of experts, which hal's experts split in the same way."""
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "replicate", "mla_kv_a_proj")
"""The styles of layers that each rank has whole, or that hal splits in its own way."""


class PartedLinear(Linear):
    """A projection whose input each rank has whole, and takes its part of."""

    _rank = 0

    def split(self, tensor: Group) -> None:
        """Compute this rank's part from now on; see :meth:`hal.nn.Linear.split`."""
        super().split(tensor)
        self._rank = tensor.rank

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        size = self.weight.shape[1]
        part = x if self.group is None else x.narrow(-1, self._rank * size, size)
        return super().forward(part)


class WholeAttention(Attention):
    """Attention that each rank computes for all heads, as its plan leaves the projections whole or gathers them."""

    def split(self, tensor: Group) -> None:
        """Keep the states of all heads."""


def splits_heads(module: nn.Module, path: str, plan: Mapping[str, str]) -> bool:
    """Return whether ranks split the heads of a layer that calls attention.

    Args:
        plan: from :func:`plan_of`.
    """
    return any(
        plan.get(f"{path}.{name}") == COLWISE for name, each in module.named_modules() if not _has_children(each)
    )


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def split_parameters(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Declare how ranks split the parameters of layers that the plan splits by heads, such as sinks."""
    for path, module in model.named_modules():
        if plan.get(path) != PARAMETERS:
            continue
        declared = {
            name: Weight((name,), "num_heads", "num_heads")
            for name, _ in module.named_parameters(recurse=False)
            if plan.get(f"{path}.{name}") == COLWISE
        }
        vars(module)["weights"] = {**vars(module).get("weights", {}), **declared}
        vars(module)["split"] = _knows_of_ranks  # The loader gives other layers whole tensors.


def _knows_of_ranks(tensor: Group) -> None:
    """Do nothing: the class computes with the tensors that it has."""


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
        head_dim: elements of a key head, which stay together in attention.
        head: whether the layer computes the logits.
    """
    if head:
        return {"shard": "out_features", "share": Share(pad=True), "gather": True} if style == GATHERED else {}
    if style in (GATHERED, PARTED):
        return {"shard": "out_features", "gather": True} if style == GATHERED else {"shard": "in_features"}
    if style not in (COLWISE, ROWWISE):
        return {}
    size = layer.out_features if style == COLWISE else layer.in_features
    in_heads = "mlp" not in path and "feed_forward" not in path and size % head_dim == 0
    share = Share(head_dim, repeat=style == COLWISE) if in_heads else Share()
    return {"shard": "out_features" if style == COLWISE else "in_features", "share": share}


def refusal(plan: Mapping[str, str]) -> str | None:
    """Return why hal cannot split a model by a plan of :func:`plan_of`, or None."""
    if not any(style in (COLWISE, ROWWISE, PARTED) for style in plan.values()):
        return "transformers has no plan that splits its projections"
    known = (COLWISE, ROWWISE, GATHERED, PARTED, PARAMETERS, *EXPERTS, *WHOLE)
    for path, style in plan.items():
        if style not in known:
            return f"transformers' plan splits {path} by {style}, which no layer of hal's does"
    return None
