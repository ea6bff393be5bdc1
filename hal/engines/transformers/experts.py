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


def routing_weights(weights: Tensor, x: Tensor) -> Tensor:
    """Return the weights of a token's experts as :func:`hal.ops.expert_unpermute` takes them: in float32 or x's dtype.

    Args:
        weights: ``[tokens, top_k]``, of any floating dtype.
        x: the tokens.
    """
    return weights if weights.dtype is torch.float32 else weights.to(x.dtype)


def _gates(module: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield hal's gated activations, by the names of their operations, and the options that may fit a module."""
    yield "silu_and_mul", {}
    for approximate in ("none", "tanh"):
        yield "gelu_and_mul", {"approximate": approximate}
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        for interleaved in (True, False):
            yield "clipped_silu_and_mul", {"alpha": alpha, "limit": limit, "interleaved": interleaved}
