"""The ends of a decoder's residual streams: copies of the embeddings, and what the last norm reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.linear import Linear
from hal.nn.weights.weight import Weight


class StreamMean(nn.Module):
    """Copies each token's embedding to several streams, and collapses these at the end: here to their mean.

    Args:
        count: the number of streams.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def expand(self, embeddings: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to ``[tokens, count, hidden_size]``."""
        return embeddings.unsqueeze(1).repeat(1, self.count, 1)

    def forward(self, streams: Tensor) -> Tensor:
        """Map ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]``."""
        return streams.float().mean(1).to(streams.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class StreamHead(StreamMean):
    """Collapses the streams to a sum with weights of each token, as :func:`hal.ops.collapse_streams` does.

    Its tensors are ``hc_fn``, ``hc_base`` and ``hc_scale``.

    Args:
        hidden_size: features of a stream.
        count: the number of streams.
        norm_eps: added to the mean square of a token's streams.
        eps: added to the weights.
    """

    def __init__(self, hidden_size: int, count: int, norm_eps: float, eps: float) -> None:
        super().__init__(count)
        self.norm_eps, self.eps = norm_eps, eps
        self.hc_fn = nn.Parameter(torch.empty(count, count * hidden_size), requires_grad=False)
        self.hc_base = nn.Parameter(torch.empty(count), requires_grad=False)
        self.hc_scale = nn.Parameter(torch.empty(1), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        return wide_weights({"hc_fn": "count features", "hc_base": "count", "hc_scale": "one"})

    def forward(self, streams: Tensor) -> Tensor:
        wide = streams.float()
        flat = wide.flatten(1)
        normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        weights = ops.pointwise(ops.linear(normed, self.hc_fn) * self.hc_scale + self.hc_base, "sigmoid") + self.eps
        return (weights.unsqueeze(-1) * wide).sum(1).to(streams.dtype)


class StreamNorm(nn.Module):
    """An RMS norm of each stream, with weights ``[count * hidden_size]``, to which 1 is added.

    Args:
        hidden_size: features of a stream.
        count: the number of streams.
        eps: added to the mean square.
    """

    unit: Tensor

    def __init__(self, hidden_size: int, count: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("unit", torch.empty(hidden_size))
        self.weight = nn.Parameter(torch.empty(count * hidden_size), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its weight, and of that of the norm before it."""
        unit = Weight((), "stream", dtype=torch.float32, values=(1.0,) * self.unit.shape[0])
        return {"unit": unit, "weight": Weight(("weight",), "features", dtype=torch.float32, offset=1.0)}

    def forward(self, streams: Tensor) -> Tensor:
        """Map ``[tokens, count, hidden_size]`` to the same shape."""
        normed = ops.rms_norm(streams.float(), self.unit, self.eps)
        return (normed * self.weight.view(streams.shape[1:])).to(streams.dtype)

    if TYPE_CHECKING:
        __call__ = forward


class GatedMean(StreamMean):
    """Collapses the streams to their mean after a norm, each element of which a gate of low rank scales.

    The gate is ``sigmoid(up(silu(down(normed) / count)))`` of all streams, one after another. Each rank has it whole.

    Args:
        hidden_size: features of a stream.
        count: the number of streams.
        rank: features between the projections of the gate.
        eps: of the norm.

    Source: Qwen Team, the published code of Qwen3.8-Flash-Next, 2026.
    """

    def __init__(self, hidden_size: int, count: int, rank: int, eps: float) -> None:
        super().__init__(count)
        self.hc_norm = StreamNorm(hidden_size, count, eps)
        self.input_mix_weight_down = Linear(count * hidden_size, rank)
        self.input_mix_weight_up = Linear(rank, count * hidden_size)

    def forward(self, streams: Tensor) -> Tensor:
        return self.mean(self.hc_norm(streams))

    def mean(self, normed: Tensor) -> Tensor:
        """Map normalized streams ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]``."""
        low = ops.pointwise(self.input_mix_weight_down(normed.flatten(1)) / self.count, "silu")
        return (ops.pointwise(self.input_mix_weight_up(low), "sigmoid").view_as(normed) * normed).mean(1)


def wide_weights(axes: Mapping[str, str]) -> Mapping[str, Weight]:
    """Return the declarations of float32 tensors that each rank has whole, from their axes by name."""
    return {name: Weight((name,), each, dtype=torch.float32) for name, each in axes.items()}
