"""Kimi delta attention, a recurrent layer whose state decays at a different rate in each channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.gated_delta_net import L2_EPS, ShortConvolution, negative_exponential
from hal.nn.linear import IN, OUT, Linear, MergedLinear
from hal.nn.model import LayerState
from hal.nn.norm import RMSNorm
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.weight import Share, Weight
from hal.step.state import SEQUENCE, LayerStates, State


class KimiDeltaAttention(nn.Module):
    """Kimi delta attention with its projections: project, convolve, apply the delta rule, normalize, gate, project.

    It keeps, for each sequence, a float32 matrix per head, and the last rows that the convolution sees. Ranks share the
    heads. The projections of decays and of gates have two factors, of which each rank keeps the first.

    Args:
        hidden_size: features of the input and of the output.
        heads: the number of heads.
        head_dim: elements of a head's query, key and value.
        width: tokens that the convolution sees.
        eps: of the norm of results.
        lower_bound: the least logarithm of a decay, which is then ``lower_bound * sigmoid(exp(A_log) * x)`` of the
            projection ``x`` with its bias; None for ``-exp(A_log) * softplus(x)``.
        lone_heads: whether the checkpoint's ``A_log`` is ``[heads]``; else it is ``[1, 1, heads, 1]``.

    Attributes:
        states: the states of the layer on this rank, ``matrix`` and ``window``, per sequence.
        rotaries: an empty tuple: it has no rotary embedding.
        causal: that a token sees only those up to itself.

    Source: Kimi Team, *Kimi Linear: An Expressive, Efficient Attention Architecture*, 2025.
    """

    rotaries: tuple[RotaryEmbedding, ...] = ()
    causal: bool = True

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        head_dim: int,
        width: int,
        eps: float,
        *,
        lower_bound: float | None = None,
        lone_heads: bool = False,
    ) -> None:
        super().__init__()
        self.lower_bound = lower_bound
        features, by_head = heads * head_dim, Share(head_dim)
        self.heads, self.head_dim, self.width = heads, head_dim, width
        self.qkv_proj = MergedLinear(
            hidden_size, dict.fromkeys(("q_proj", "k_proj", "v_proj"), features), share=by_head
        )
        self.conv1d = ShortConvolution([features] * 3, width, ("q_conv1d", "k_conv1d", "v_conv1d"))
        self.gates_proj = MergedLinear(hidden_size, {"f_a_proj": head_dim, "g_a_proj": head_dim}, shard=None)
        self.f_b_proj = Linear(head_dim, features, shard=OUT, share=by_head)
        self.g_b_proj = Linear(head_dim, features, shard=OUT, share=by_head)
        self.b_proj = Linear(hidden_size, heads, shard=OUT)
        factor = torch.empty(heads) if lone_heads else torch.empty(1, 1, heads, 1)
        self.decay_factor = nn.Parameter(factor, requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(features), requires_grad=False)
        self.o_norm = RMSNorm(head_dim, eps)
        self.o_proj = Linear(features, hidden_size, shard=IN, share=by_head)
        self.states = self._states(heads)

    def _states(self, heads: int) -> LayerStates:
        matrix, channels = (heads, self.head_dim, self.head_dim), 3 * heads * self.head_dim
        return {
            "matrix": State(SEQUENCE, matrix, dtype=torch.float32, saved=True),
            "window": State(SEQUENCE, (self.width - 1, channels), saved=True),
        }

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of the tensors that no part of the layer holds, in float32."""
        bias = Weight(("dt_bias",), "features", "features", dtype=torch.float32, share=Share(self.head_dim))
        axes = "heads" if self.decay_factor.dim() == 1 else "one two heads three"
        factor = attrs.evolve(bias, sources=("A_log",), axes=axes, shard="heads", share=Share())
        return {"dt_bias": bias, "decay_factor": attrs.evolve(factor, function=negative_exponential)}

    def split(self, tensor: Group) -> None:
        """Compute this rank's heads from now on.

        Raises:
            ConfigError: the ranks cannot share the heads.
        """
        self.states = self._states(Share().size(self.heads, tensor.size))

    def forward(self, hidden: Tensor, angles: Any, batch: Any, state: LayerState, *further: Any) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape.

        Args:
            hidden: the tokens.
            angles: None; it is for attention.
            batch: the step, a :class:`hal.step.SlotBatch`.
            state: the layer's states.
            further: not read.
        """
        by_head = (-1, self.head_dim)
        mixed = self.conv1d(self.qkv_proj(hidden), batch, state["window"]).unflatten(1, by_head)
        query_key, value = mixed.tensor_split([2 * mixed.shape[1] // 3], dim=1)
        query, key = ops.l2_norm(query_key, L2_EPS).chunk(2, dim=1)
        fade, gate = self.gates_proj(hidden).chunk(2, dim=-1)
        raw = (self.f_b_proj(fade).float() + self.dt_bias).unflatten(1, by_head)
        factor = self.decay_factor.view(-1, 1)
        if self.lower_bound is None:
            decay = factor * ops.pointwise(raw, "softplus")
        else:
            decay = self.lower_bound * ops.pointwise(-factor * raw, "sigmoid")
        read_slots, write_slots = batch.state_slots
        output = ops.channel_delta_rule(
            query,
            key,
            value,
            decay,
            ops.pointwise(self.b_proj(hidden), "sigmoid"),
            state["matrix"],
            read_slots,
            write_slots,
            batch.query_start_loc,
            batch.query_start_loc_host,
            self.head_dim**-0.5,
        )
        gated = self.o_norm(output) * ops.pointwise(self.g_b_proj(gate), "sigmoid").unflatten(1, by_head)
        return self.o_proj(gated.flatten(1))

    if TYPE_CHECKING:
        __call__ = forward
