"""Linear projections and embedding lookups."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op
from hal.ops.declaration.samples import Draw, Sample


def _linear_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, width, out in ((1, 64, 96), (17, 128, 64), (0, 32, 16)):
        yield draw.normal(tokens, width), draw.normal(out, width, scale=width**-0.5), None
        yield draw.normal(tokens, width), draw.normal(out, width, scale=width**-0.5), draw.normal(out)
    yield draw.normal(64, 3).t(), draw.normal(32, 64, scale=0.125), draw.normal(64)[::2]  # no unit stride
    yield draw.normal(2, 3, 32), draw.normal(48, 32, scale=0.125), None


@op(
    samples=_linear_samples,
    axes={
        "x": "... in_features",
        "weight": "out_features in_features",
        "bias": "out_features",
        "return": "... out_features",
    },
    dtypes={"x": FLOATING, "weight": "x", "bias": "x", "return": "x"},
    rowwise="...",
    weights=("weight",),
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, accumulated in float32 and rounded to x's dtype.

    Args:
        x: ``[..., in_features]``, floating.
        weight: ``[out_features, in_features]``, of x's dtype, in the layout that the driver prepared.
        bias: ``[out_features]``, of x's dtype, or None.

    Returns:
        ``[..., out_features]``, of x's dtype.
    """
    return functional.linear(x, weight, bias)


def _embedding_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, vocabulary, width in ((1, 10, 64), (33, 100, 96), (0, 4, 8)):
        for dtype in (torch.int32, torch.int64):
            yield draw.integers(0, vocabulary, tokens, dtype=dtype), draw.normal(vocabulary, width)


@op(
    samples=_embedding_samples,
    axes={"token_ids": "tokens", "weight": "vocab_size width", "return": "tokens width"},
    dtypes={"token_ids": (torch.int32, torch.int64), "weight": FLOATING, "return": "weight"},
    rowwise="tokens",
)
def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Return row ``token_ids[i]`` of ``weight`` for each token ``i``.

    Args:
        token_ids: ``[tokens]``, int32 or int64, less than ``vocab_size``, which the caller checks.
        weight: ``[vocab_size, width]``, floating.

    Returns:
        ``[tokens, width]``, of weight's dtype.
    """
    return functional.embedding(token_ids, weight)
