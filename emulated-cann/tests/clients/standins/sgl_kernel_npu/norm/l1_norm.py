"""Division of the weights of a token's experts by their sum."""

from __future__ import annotations

from torch import Tensor


def l1_norm(weights: Tensor) -> Tensor:
    """Return the rows ``[tokens, experts]``, each divided by the sum of its magnitudes."""
    return weights / weights.abs().sum(-1, keepdim=True)
