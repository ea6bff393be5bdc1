"""Hyper-connections: decoder layers with several residual streams, and the ends of these streams.

Source: Zhu et al., *Hyper-Connections*, 2025; Xie et al., *mHC: Manifold-Constrained Hyper-Connections*, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.decoder import DecoderLayer
from hal.nn.decoder_config import DecoderConfig
from hal.nn.model import Angles, LayerState, Mixer
from hal.nn.router import Gate
from hal.nn.streams import GatedMean, wide_weights
from hal.nn.weights.weight import Weight
from hal.ops import HyperConnectionOptions
from hal.step.batch import Batch


class HyperConnection(nn.Module):
    """:func:`hal.ops.collapse_streams`, with its tensors ``fn``, ``base`` and ``scale``. Each rank has them whole.

    Args:
        hidden_size: features of a stream.
        count: the number of streams.
        options: epsilons and iterations.
    """

    def __init__(self, hidden_size: int, count: int, options: HyperConnectionOptions) -> None:
        super().__init__()
        rows, self.options = options.rows(count), options
        self.fn = nn.Parameter(torch.empty(rows, count * hidden_size), requires_grad=False)
        self.base = nn.Parameter(torch.empty(rows), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(3 if options.iterations else 2), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        return wide_weights({"fn": "weights features", "base": "weights", "scale": "parts"})

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]`` and two weights of the way back."""
        return ops.collapse_streams(streams, self.fn, self.base, self.scale, self.options)

    def add(self, streams: Tensor, output: Tensor, *weights: Tensor) -> Tensor:
        """Return the streams with an output ``[tokens, hidden_size]``, by the weights that :meth:`forward` returned."""
        return ops.expand_streams(streams, output, *weights)

    if TYPE_CHECKING:
        __call__ = forward


class GatedConnection(GatedMean):
    """A :class:`GatedMean` that a layer's part reads, and a weight of each stream, by which its output is added.

    The weights are ``2 * sigmoid(block_inject_weight(normed) / count)``. Its arguments are those of :class:`GatedMean`.

    Source: Qwen Team, the published code of Qwen3.8-Flash-Next, 2026.
    """

    def __init__(self, hidden_size: int, count: int, rank: int, eps: float) -> None:
        super().__init__(hidden_size, count, rank, eps)
        self.block_inject_weight = Gate(count * hidden_size, count)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # and weights
        """Map ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]`` and the weights ``[tokens, count]``."""
        normed = self.hc_norm(streams)
        weights = self.block_inject_weight(normed.flatten(1)) / self.count
        return self.mean(normed), 2 * ops.pointwise(weights, "sigmoid")

    def add(self, streams: Tensor, output: Tensor, weights: Tensor) -> Tensor:
        """Return the streams, each with the output ``[tokens, hidden_size]`` times its weight."""
        return streams + output.unsqueeze(1) * weights.unsqueeze(-1)

    if TYPE_CHECKING:
        __call__ = forward  # type: ignore[assignment]  # see above


class HyperDecoderLayer(DecoderLayer):
    """A layer with hyper-connections: attention and MLP each read collapsed streams, and add to streams that they mix.

    Its decoder has a :class:`StreamMean` or a :class:`StreamHead`.

    Args:
        config: the sizes.
        mixer: as of :class:`DecoderLayer`, like further arguments, except ``parallel``.
        mlp: see there.
        connection: makes each of the layer's two connections, ``attn_hc`` and ``ffn_hc``: a :class:`HyperConnection` or
            a :class:`GatedConnection`.
        options: further arguments.
    """

    def __init__(
        self,
        config: DecoderConfig,
        mixer: Mixer,
        mlp: nn.Module,
        *,
        connection: Callable[[], HyperConnection | GatedConnection],
        **options: Any,
    ) -> None:
        super().__init__(config, mixer, mlp, **options)
        self.attn_hc, self.ffn_hc = connection(), connection()

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, *further: Any) -> Tensor:
        """Map the streams ``[tokens, count, hidden_size]`` to the same shape."""
        read, *weights = self.attn_hc(hidden)
        output = self.self_attn(self._norm(self.norms.before_attention, read), angles, batch, state, *further)
        hidden = self.attn_hc.add(hidden, self._output(self.norms.after_attention, output), *weights)
        read, *weights = self.ffn_hc(hidden)
        output = self.feed_forward(read, self._norm(self.norms.before_mlp, read), batch)
        return self.ffn_hc.add(hidden, self._output(self.norms.after_mlp, output), *weights)

    if TYPE_CHECKING:
        __call__ = forward
