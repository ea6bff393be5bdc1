"""Whole MLPs of experts: the order of assignments, two products and the weighted sum, without copies of rows."""

from __future__ import annotations

from torch import Tensor

from ..arguments import require
from .grouped import project
from .permutation import expert_unpermute, order, require_routing


def expert_mlp(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """See :func:`hal.ops.expert_mlp`. The first product reads the tokens' rows in place, and applies the activation."""
    require_mlp("expert_mlp", x, gate_up, down, weights, experts)
    require(gate_up.dtype is down.dtype is x.dtype, "expert_mlp", x, gate_up, down)
    found = order(experts, gate_up.shape[0], tokens=True)
    activated = project(x, gate_up, found.counts, x.dtype, tokens=found.tokens, gated=True)
    return expert_unpermute(project(activated, down, found.counts, x.dtype), found.positions, weights)


def require_mlp(operation: str, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> None:
    """Check the shapes of both weights, and the routing.

    Raises:
        OperationError: they do not match.
    """
    require_routing(operation, x, experts)
    fits = gate_up.dim() == down.dim() == 3 and gate_up.shape[0] == down.shape[0] > 0 and gate_up.shape[1] % 2 == 0
    fits = fits and gate_up.shape[2] == down.shape[1] == x.shape[1] and down.shape[2] * 2 == gate_up.shape[1]
    fits = fits and weights.shape == experts.shape and weights.dtype is x.dtype
    require(fits, operation, x, gate_up, down, weights, experts)
