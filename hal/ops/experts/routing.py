"""The choice of experts for each token, and the rows sorted by expert and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op

SMALLEST_SUM = 1e-20
"""Added to the sum of a token's scores before they are divided by it: sigmoid scores may all be 0."""


def _route_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, experts, top_k in ((1, 8, 2), (17, 64, 8), (0, 16, 4), (5, 6, 6), (9, 4, 1)):
        logits = draw.normal(tokens, experts)
        yield logits, None, top_k, False, True, 1.0, 1, 1, 1
        yield logits, None, top_k, False, False, 1.0, 1, 1, 1
        yield logits, draw.normal(experts).float(), top_k, True, True, 2.5, 1, 1, 1
    for best, sigmoid in ((1, False), (2, True)):  # groups of experts
        bias = draw.normal(32).float() if sigmoid else None
        yield draw.normal(11, 32), bias, 4, sigmoid, True, 1.5, 8, 3, best
    yield draw.tensor([[1.0, 2.0, 2.0, 2.0], [0.0] * 4], draw.dtype), None, 2, False, True, 1.0, 1, 1, 1  # ties


@op(
    samples=_route_samples,
    axes={"logits": "tokens num_experts", "bias": "num_experts", "return": ("tokens top_k", "tokens top_k")},
    dtypes={"logits": FLOATING, "bias": torch.float32, "return": ("logits", torch.int32)},
    rowwise="tokens",
)
def topk_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts for each token, and their weights.

    The scores are the softmax or the sigmoid of the logits. The experts with the highest scores are chosen, in
    descending order; of equal scores, the lower expert comes first. The weights are the scores of the chosen experts,
    divided by their sum if ``renormalize``, times ``scale``. Computed in float32, and rounded to logits' dtype once.
    A token with a NaN logit has a NaN weight, with softmax or ``renormalize`` only such weights, and valid experts.

    Args:
        logits: ``[tokens, num_experts]``, floating.
        bias: ``[num_experts]``, float32, added to the scores for the choice only; or None.
        top_k: the number of experts per token, at most the number of experts in the chosen groups.
        sigmoid: whether the scores are the sigmoid of the logits; their softmax otherwise.
        renormalize: whether to divide the weights of a token by their sum.
        scale: the factor of the weights.
        num_groups: the number of equal groups of consecutive experts; 1 for no groups.
        top_groups: the number of groups whose experts may be chosen, those with the highest group scores.
        group_best: a group's score is the sum of this number of its highest scores: 1 or 2, at most its experts.

    Returns:
        The weights, ``[tokens, top_k]``, of logits' dtype, and the experts, int32 ``[tokens, top_k]``.

    Source: Shazeer et al., *Outrageously Large Neural Networks*, 2017 (softmax); DeepSeek-AI, *DeepSeek-V3 Technical
    Report*, 2024 (sigmoid, bias and groups).
    """
    wide = logits.float()
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = grouped.sort(dim=-1, descending=True, stable=True).values[..., :group_best].sum(-1)
        ranked = best.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        kept = torch.zeros_like(best).scatter(-1, ranked, 1.0).bool()
        choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return (weights * scale).to(logits.dtype), experts.to(torch.int32)


ROUTINGS = ((1, 8, 2), (17, 8, 2), (6, 4, 4), (0, 4, 2), (5, 16, 1))
"""Tokens, experts, and experts per token."""


def routing(draw: Draw, tokens: int, num_experts: int, top_k: int) -> Tensor:
    """Return distinct random experts for each token, int32 ``[tokens, top_k]``."""
    order = [draw.permutation(num_experts)[:top_k] for _ in range(tokens)]
    return torch.stack(order) if order else draw.integers(0, 1, 0, top_k, dtype=torch.int32)


def _permute_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, num_experts, top_k in ROUTINGS:
        yield draw.normal(tokens, 32 * top_k), routing(draw, tokens, num_experts, top_k), num_experts
    yield draw.normal(9, 24), draw.integers(3, 4, 9, 1, dtype=torch.int32), 8  # all to one expert


@op(
    samples=_permute_samples,
    axes={
        "x": "tokens width",
        "experts": "tokens top_k",
        "return": ("tokens*top_k width", "num_experts", "tokens*top_k"),
    },
    dtypes={"x": FLOATING, "experts": torch.int32, "return": ("x", torch.int64, torch.int32)},
    rowwise=None,
)
def expert_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token's row for each of its experts, sorted by expert, then by token.

    Args:
        x: ``[tokens, width]``, floating.
        experts: ``[tokens, top_k]``, int32, from 0 to ``num_experts - 1``.
        num_experts: the number of experts.

    Returns:
        The rows, ``[tokens * top_k, width]``, of x's dtype; the number of rows of each expert, int64
        ``[num_experts]``; and the row of each assignment, int32 ``[tokens * top_k]``: that of the token ``t`` for
        ``experts[t, k]`` is at ``t * top_k + k``.
    """
    assigned = experts.flatten()
    order = assigned.argsort(stable=True)
    rows = x[order // experts.shape[1]]
    counts = (assigned.unsqueeze(-1) == torch.arange(num_experts, device=x.device)).sum(0)
    return rows, counts, order.argsort().to(torch.int32)


WEIGHTS = ("rows", torch.float32)
"""The dtypes of the weights of a token's experts: routers may compute them in float32."""


def _unpermute_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, _, top_k in ROUTINGS:
        rows = draw.permutation(tokens * top_k)
        yield draw.normal(tokens * top_k, 48 * top_k), rows, draw.normal(tokens, top_k).abs()
    yield draw.normal(6, 48), draw.permutation(6), draw.normal(2, 3).abs().float()


@op(
    samples=_unpermute_samples,
    axes={
        "rows": "tokens*top_k width",
        "positions": "tokens*top_k",
        "weights": "tokens top_k",
        "return": "tokens width",
    },
    dtypes={"rows": FLOATING, "positions": torch.int32, "weights": WEIGHTS, "return": "rows"},
    rowwise=None,
)
def expert_unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows: ``sum(weights[t, k] * rows[positions[t * top_k + k]])``.

    Computed in float32, and rounded to the dtype of rows once.

    Args:
        rows: ``[tokens * top_k, width]``, floating.
        positions: ``[tokens * top_k]``, int32, as :func:`expert_permute` returns them.
        weights: ``[tokens, top_k]``, of the dtype of rows, or float32.

    Returns:
        ``[tokens, width]``, of the dtype of rows.
    """
    taken = rows[positions.long()].unflatten(0, weights.shape).float()
    output: Tensor = (taken * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)
    return output
