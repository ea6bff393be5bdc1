"""Hyper-connections: several residual streams, which a layer's parts read, write and mix by weights of each token."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op


@attrs.frozen
class HyperConnectionOptions:
    """The options of hyper-connections.

    Attributes:
        norm_eps: added to the mean square of a token's streams.
        eps: added to the weights that collapse streams, and to those that mix them before each normalization.
        iterations: how often the columns of the mixing weights are normalized, by the algorithm of Sinkhorn and Knopp;
            0 for streams that are not mixed, as in HY-V4.
        magnitude: the factor of the weights that expand an output to streams.
        post_eps: added to these.

    Raises:
        OperationError: the number of iterations is negative.
    """

    norm_eps: float
    eps: float
    iterations: int
    magnitude: float = 2.0
    post_eps: float = 0.0

    def __attrs_post_init__(self) -> None:
        if self.iterations < 0:
            raise OperationError(
                f"hyper-connections have {self.iterations} iterations", "set iterations to 0 or more; 0 does not mix"
            )

    def rows(self, count: int) -> int:
        """Return the number of weights that ``count`` streams of a token need."""
        return count * (2 + count * bool(self.iterations))


def _collapse_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, count, hidden, options in (
        (1, 4, 64, HyperConnectionOptions(1e-6, 1e-6, 20)),
        (7, 4, 96, HyperConnectionOptions(1e-5, 1e-3, 2)),
        (3, 2, 128, HyperConnectionOptions(1e-6, 1e-2, 1)),
        (5, 3, 32, HyperConnectionOptions(1e-6, 1e-6, 0, 1.5, 1e-2)),
    ):
        rows, parts = options.rows(count), 3 if options.iterations else 2
        projection = draw.normal(rows, count * hidden, scale=(count * hidden) ** -0.5).float()
        base, scale = draw.normal(rows).float(), draw.normal(parts).float()
        yield draw.normal(tokens, count, hidden), projection, base, scale, options
    yield draw.normal(2, count, hidden, scale=1e-4), projection, base, scale, options  # epsilon matters


@op(
    samples=_collapse_samples,
    axes={
        "streams": "tokens count hidden",
        "projection": "weights count*hidden",
        "base": "weights",
        "scale": "parts",
        "return": ("tokens hidden", "tokens count", "tokens count count"),
    },
    dtypes={
        "streams": FLOATING,
        **dict.fromkeys(("projection", "base", "scale"), torch.float32),
        "return": ("streams", torch.float32, torch.float32),
    },
    rowwise="tokens",
)
def collapse_streams(
    streams: Tensor, projection: Tensor, base: Tensor, scale: Tensor, options: HyperConnectionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse each token's residual streams to the input of a layer's part, and weigh its way back.

    The weights are ``projection @ n * scale + base``, where ``n`` are the normalized streams of the token, one after
    another. The first ``count`` weights ``w`` collapse: ``sum(streams * (sigmoid(w) + eps))``. The next ones expand the
    output of the part: ``magnitude * sigmoid(w) + post_eps``. The others mix the streams: the softmax of each row, plus
    ``eps``, whose columns are divided by their sums plus ``eps``, then rows and columns in turn, until the columns were
    divided ``iterations`` times. Computed in float32; the collapsed streams are rounded once.

    Args:
        streams: ``[tokens, count, hidden]``, floating.
        projection: ``[count * (2 + count), count * hidden]``, float32; ``[count * 2, count * hidden]`` without mixing.
        base: ``[count * (2 + count)]``, float32, or ``[count * 2]``.
        scale: ``[3]``, float32: of the weights that collapse, expand and mix; ``[2]`` without mixing.
        options: epsilons and iterations.

    Returns:
        ``[tokens, hidden]`` of streams' dtype; ``[tokens, count]`` and ``[tokens, count, count]``, float32, the weights
        that :func:`expand_streams` takes. Without mixing, the last is the identity.

    Raises:
        OperationError: the number of weights is not that of the streams.

    Source: Xie et al., *mHC: Manifold-Constrained Hyper-Connections*, 2025.
    """
    count, mixes = streams.shape[1], options.iterations > 0
    if (projection.shape[0], scale.shape[0]) != (options.rows(count), 2 + mixes):
        raise OperationError(
            f"collapse_streams has {projection.shape[0]} weights and {scale.shape[0]} scales for {count} streams",
            f"give it {options.rows(count)} weights and {2 + mixes} scales",
        )
    wide = streams.float()
    flat = wide.flatten(1)
    normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + options.norm_eps)
    parts = (normed @ projection.t()).split(count, dim=1), base.split(count)
    pre, post, *mixed = (
        weight * scale[min(index, 2)] + bias for index, (weight, bias) in enumerate(zip(*parts, strict=True))
    )
    collapsed = ((pre.sigmoid() + options.eps).unsqueeze(-1) * wide).sum(1).to(streams.dtype)
    post = options.magnitude * post.sigmoid() + options.post_eps
    if not mixes:
        return collapsed, post, torch.eye(count, device=streams.device).repeat(streams.shape[0], 1, 1)
    mix = torch.stack(mixed, 1).softmax(-1) + options.eps
    mix = mix / (mix.sum(-2, keepdim=True) + options.eps)
    for _ in range(options.iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + options.eps)
        mix = mix / (mix.sum(-2, keepdim=True) + options.eps)
    return collapsed, post, mix


def _expand_samples(draw: Draw) -> Iterator[Sample]:
    for tokens, count, hidden in ((1, 4, 64), (7, 4, 96), (3, 2, 128), (0, 3, 32)):
        weights = draw.normal(tokens, count).float(), draw.normal(tokens, count, count).float()
        yield draw.normal(tokens, count, hidden), draw.normal(tokens, hidden), *weights


@op(
    samples=_expand_samples,
    axes={
        "streams": "tokens count hidden",
        "output": "tokens hidden",
        "post": "tokens count",
        "mix": "tokens count count",
        "return": "tokens count hidden",
    },
    dtypes={"streams": FLOATING, "output": "streams", "post": torch.float32, "mix": torch.float32, "return": "streams"},
    rowwise="tokens",
)
def expand_streams(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Mix each token's residual streams, and add the output of a layer's part to each.

    The stream ``i`` becomes ``post[i] * output + sum(mix[j, i] * streams[j] for all j)``. Computed in float32, and
    rounded once.

    Args:
        streams: ``[tokens, count, hidden]``, floating.
        output: ``[tokens, hidden]``, of streams' dtype.
        post: ``[tokens, count]``, float32, as of :func:`collapse_streams`.
        mix: ``[tokens, count, count]``, float32, likewise.

    Returns:
        A tensor of the shape and dtype of ``streams``.

    Source: Xie et al., *mHC: Manifold-Constrained Hyper-Connections*, 2025.
    """
    mixed = mix.transpose(1, 2) @ streams.float()
    return (post.unsqueeze(-1) * output.float().unsqueeze(1) + mixed).to(streams.dtype)
