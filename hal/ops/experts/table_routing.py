"""Routing whose scores are square roots of softplus, by the best scores or by a table of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.experts.routing import SMALLEST_SUM, routing


def _samples(draw: Draw) -> Iterator[Sample]:
    for tokens, experts, top_k in ((1, 8, 2), (17, 64, 6), (0, 16, 4), (5, 6, 6)):
        logits = draw.normal(tokens, experts)
        yield logits, None, None, top_k, 1.5
        yield logits, draw.normal(experts).float(), None, top_k, 1.0
        yield logits, None, routing(draw, tokens, experts, top_k), top_k, 2.5
    yield draw.tensor([[1.0, 2.0, 2.0, 2.0], [0.0] * 4], draw.dtype), None, None, 2, 1.0  # ties
    yield draw.normal(3, 8, scale=30.0), None, None, 3, 1.0  # where softplus is linear, and where it vanishes


@op(
    samples=_samples,
    axes={
        "logits": "tokens num_experts",
        "bias": "num_experts",
        "chosen": "tokens top_k",
        "return": ("tokens top_k", "tokens top_k"),
    },
    dtypes={"logits": FLOATING, "bias": torch.float32, "chosen": torch.int32, "return": ("logits", torch.int32)},
    rowwise="tokens",
)
def softplus_route(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Weigh ``top_k`` experts for each token: those with the highest scores, or those that were chosen before.

    The scores are ``sqrt(softplus(logits))``. The weights are the scores of the token's experts, divided by their sum,
    times ``scale``. Computed in float32, and rounded to logits' dtype once. A token with a NaN logit has NaN weights if
    its experts include the NaN's, and valid experts.

    Args:
        logits: ``[tokens, num_experts]``, floating.
        bias: ``[num_experts]``, float32, added to the scores for the choice only; or None.
        chosen: ``[tokens, top_k]``, int32: the experts of each token; None for those with the highest scores, in
            descending order, of equal ones the lower first.
        top_k: the number of experts per token.
        scale: the factor of the weights.

    Returns:
        The weights, ``[tokens, top_k]``, of logits' dtype, and the experts, int32 ``[tokens, top_k]``.

    Source: DeepSeek-AI, *DeepSeek-V4*, 2026.
    """
    scores = functional.softplus(logits.float()).sqrt()
    if chosen is None:
        choice = scores if bias is None else scores + bias
        experts = choice.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    else:
        experts = chosen.long()
    weights = scores.gather(-1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM) * scale
    return weights.to(logits.dtype), experts.to(torch.int32)
