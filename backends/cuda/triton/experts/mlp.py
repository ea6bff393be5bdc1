"""Whole MLPs of experts: the order of assignments, two products and the weighted sum, without copies of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops import GatedActivation

from ..activation import clipped_silu_and_mul, gelu_and_mul, silu_and_mul
from ..arguments import require
from .grouped import project, require_bias
from .permutation import expert_unpermute, order, require_routing


def expert_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: GatedActivation,
) -> Tensor:
    """See :func:`hal.ops.expert_mlp`. The first product reads the tokens' rows in place, and applies a SiLU."""
    require_mlp("expert_mlp", x, gate_up, down, weights, experts)
    require(gate_up.dtype is down.dtype is x.dtype, "expert_mlp", x, gate_up, down)
    require_bias("expert_mlp", x, gate_up, gate_up_bias)
    require_bias("expert_mlp", x, down, down_bias)
    found = order(experts, gate_up.shape[0], tokens=True)
    silu = activation == GatedActivation()
    rows = project(x, gate_up, found.counts, x.dtype, tokens=found.tokens, bias=gate_up_bias, gated=silu)
    if not silu:
        rows = activation.apply(rows, silu_and_mul, gelu_and_mul, clipped_silu_and_mul)
    output = project(rows, down, found.counts, x.dtype, bias=down_bias)
    return expert_unpermute(output, found.positions, weights)


def require_mlp(operation: str, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> None:
    """Check the shapes of both weights, and the routing.

    Raises:
        OperationError: they do not match.
    """
    require_routing(operation, x, experts)
    fits = gate_up.dim() == down.dim() == 3 and gate_up.shape[0] == down.shape[0] > 0 and gate_up.shape[1] % 2 == 0
    fits = fits and gate_up.shape[2] == down.shape[1] == x.shape[1] and down.shape[2] * 2 == gate_up.shape[1]
    fits = fits and weights.shape == experts.shape and weights.dtype in (x.dtype, torch.float32)
    require(fits, operation, x, gate_up, down, weights, experts)
