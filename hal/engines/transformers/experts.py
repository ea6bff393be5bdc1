"""Mixtures of experts of transformers' models, computed with hal's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal import ops

Gate = Callable[[Tensor], Tensor]
"""Of gate and up, ``[..., 2 * width]``, to ``[..., width]``."""


def gate_of(module: Any) -> Gate | None:
    """Return hal's activation that computes what experts do between their projections, or None.

    Args:
        module: the experts of a transformers model; its method ``_apply_gate`` is compared on random values.
    """
    with torch.device("cpu"), torch.no_grad():
        x = 5 * torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        try:
            found = module._apply_gate(x)
        except Exception:  # A gate of another form may raise anything.
            return None
        for name, options in _gates(module):
            if found.shape == (3, 16) and torch.allclose(found, ops.operation(name).body(x, **options), 1e-4, 1e-5):
                return partial(getattr(ops, name), **options) if options else ops.silu_and_mul
    return None


def _gates(module: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield hal's gated activations, by the names of their operations, and the options that may fit a module."""
    yield "silu_and_mul", {}
    for approximate in ("none", "tanh"):
        yield "gelu_and_mul", {"approximate": approximate}
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        for interleaved in (True, False):
            yield "clipped_silu_and_mul", {"alpha": alpha, "limit": limit, "interleaved": interleaved}


def why_not(module: Any) -> str | None:
    """Return why :func:`compute_experts` cannot compute the experts of a transformers model, or None."""
    for name, wanted in (("has_gate", True), ("has_bias", False), ("is_transposed", False)):
        if getattr(module, name, wanted) is not wanted:
            return f"{name} is {not wanted}"
    if getattr(module, "has_post_expert_norm", False):
        return "there is a norm behind each expert"
    return None if gate_of(module) is ops.silu_and_mul else "the gate is not SiLU of the first half"


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a layer with :func:`hal.ops.expert_mlp`; the function for ``ExpertsInterface``.

    Args:
        module: holds ``gate_up_proj`` ``[num_experts, 2 * width, hidden]`` and ``down_proj``; see :func:`why_not`.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: ``[tokens, top_k]``, int64.
        top_k_weights: ``[tokens, top_k]``, floating.
    """
    return ops.expert_mlp(
        hidden_states, module.gate_up_proj, module.down_proj, top_k_weights.to(hidden_states.dtype), top_k_index.int()
    )
