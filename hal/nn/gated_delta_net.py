"""The gated delta network, a recurrent layer in the place of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs.validators import ge, le
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.linear import Linear, MergedLinear
from hal.nn.model import LayerState
from hal.nn.rope_parameters import SIZE
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.assembly import Merged
from hal.nn.weights.weight import Consumer, Share, Weight, unshared
from hal.step.model_batches import SlotBatch
from hal.step.state import SEQUENCE, LayerStates, State

L2_EPS = 1e-6


def _negative_exponential(x: Tensor) -> Tensor:
    return -x.exp()


@attrs.frozen(kw_only=True)
class DeltaNetSizes:
    """The sizes of a gated delta network.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of them.
        key_dim: elements of a query or key of a head.
        value_dim: elements of a value of a head.
        conv_width: tokens that the convolution sees, 2 to 4.

    Raises:
        ValueError: a size is out of range. :func:`hal.config.read` turns it into a ConfigError.
    """

    key_heads: int = attrs.field(validator=SIZE)
    value_heads: int = attrs.field(validator=SIZE)
    key_dim: int = attrs.field(validator=SIZE)
    value_dim: int = attrs.field(validator=SIZE)
    conv_width: int = attrs.field(validator=[ge(2), le(4)])

    def __attrs_post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value heads are not a multiple of {self.key_heads} key heads")

    @property
    def parts(self) -> Mapping[str, int]:
        """The features of all heads: of queries, keys, values, and the gates of the values."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return {"query": keys, "key": keys, "value": values, "gate": values}

    @property
    def channels(self) -> int:
        """The channels of the convolution: those of queries, keys and values."""
        return sum(self.parts.values()) - self.parts["gate"]


class ShortConvolution(nn.Module):
    """The weights of :func:`hal.ops.causal_conv1d`, from those of a depthwise convolution without bias.

    Args:
        parts: the channels of each part, of which ranks have equal shares.
        width: tokens that it sees.
    """

    def __init__(self, parts: Sequence[int], width: int) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.weight = nn.Parameter(torch.empty(width, 1, sum(parts)), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of its weight, ``[channels, 1, width]`` in the checkpoint."""
        assembly = Merged("channels", self.parts, order=("channels", "one", "width"))
        consumer = Consumer("causal_conv1d", "weight")
        return {"weight": Weight(("weight",), "width one channels", "channels", assembly, consumer)}

    def split(self, tensor: Group) -> None:
        """Convolve this rank's channels from now on, which the weight says."""

    def forward(self, x: Tensor, batch: SlotBatch, window: Tensor) -> Tensor:
        """Map ``[tokens, channels]`` to the same shape, through SiLU.

        Args:
            x: the channels.
            batch: the step.
            window: the state of all sequences; see :func:`hal.ops.causal_conv1d`.
        """
        return ops.causal_conv1d(
            x,
            self.weight.squeeze(1),
            None,
            window,
            batch.slots,
            None,
            batch.query_start_loc,
            batch.query_start_loc_host,
            True,
        )

    if TYPE_CHECKING:
        __call__ = forward


class GatedDeltaNet(nn.Module):
    """A gated delta network with its projections: project, convolve, apply the delta rule, normalize, gate, project.

    It keeps, for each sequence, a matrix per value head, and the last rows that the convolution sees. Ranks share its
    key heads, each with its value heads.

    Args:
        hidden_size: features of the input and of the output.
        sizes: heads, and their sizes.
        eps: of the norm.
        qkvz: where the checkpoint has the rows of the projection to query, key, value and gate, each of all heads; see
            :class:`MergedLinear`.
        ba: likewise of the projection to ``b`` and ``a`` of :func:`hal.ops.delta_rule_gates`.
        state_dtype: the dtype of the matrices; None for that of the model's weights.

    Attributes:
        states: the states of the layer on this rank, ``matrix`` and ``window``, per sequence.
        rotaries: an empty tuple: it has no rotary embedding.
        causal: that a token sees only those up to itself.

    Source: Yang et al., *Gated Delta Networks: Improving Mamba2 with Delta Rule*, 2024; Qwen Team, *Qwen3-Next*, 2025.
    """

    rotaries: tuple[RotaryEmbedding, ...] = ()
    causal: bool = True

    def __init__(
        self,
        hidden_size: int,
        sizes: DeltaNetSizes,
        *,
        eps: float,
        qkvz: Sequence[tuple[str, int, int]],
        ba: Sequence[tuple[str, int, int]],
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        self.sizes, self.eps, self.state_dtype = sizes, eps, state_dtype
        heads, values = sizes.value_heads, sizes.parts["value"]
        self.qkvz_proj = MergedLinear(hidden_size, sizes.parts, rows=qkvz)
        self.ba_proj = MergedLinear(hidden_size, {"b": heads, "a": heads}, rows=ba)
        self.conv1d = ShortConvolution(tuple(sizes.parts.values())[:3], sizes.conv_width)
        self.decay_factor = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.norm = GatedRMSNorm(sizes.value_dim, eps)
        self.out_proj = Linear(values, hidden_size, shard="in_features")
        self.states = self._states(1)

    def _states(self, ranks: int) -> LayerStates:
        sizes = self.sizes
        return {
            "matrix": State(
                SEQUENCE, (sizes.value_heads // ranks, sizes.value_dim, sizes.key_dim), dtype=self.state_dtype
            ),
            "window": State(SEQUENCE, (sizes.conv_width - 1, sizes.channels // ranks)),
        }

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its own tensors, in float32."""
        bias = Weight(
            ("dt_bias",),
            "heads",
            "heads",
            dtype=torch.float32,
            share=Share(self.sizes.value_heads // self.sizes.key_heads),
        )
        decay = attrs.evolve(bias, sources=("A_log",), function=_negative_exponential)
        return {"decay_factor": decay, "dt_bias": bias}

    def split(self, tensor: Group) -> None:
        """Compute this rank's heads from now on.

        Raises:
            ConfigError: the ranks cannot share the key heads.
        """
        if self.sizes.key_heads % tensor.size:
            divisors = [each for each in range(1, self.sizes.key_heads + 1) if self.sizes.key_heads % each == 0]
            raise unshared(
                f"{tensor.size} ranks cannot share the {self.sizes.key_heads} key heads of a recurrent layer equally",
                "one of",
                divisors,
            )
        self.states = self._states(tensor.size)

    def forward(self, hidden: Tensor, angles: Any, batch: Any, state: LayerState) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape.

        Args:
            hidden: the tokens.
            angles: None; it is for attention.
            batch: the step, a :class:`hal.step.SlotBatch`.
            state: the layer's states.
        """
        key_dim, value_dim = self.sizes.key_dim, self.sizes.value_dim
        keys, _, values, _ = self.qkvz_proj.sizes
        qkv, gate = self.qkvz_proj(hidden).split([2 * keys + values, values], dim=-1)
        b, a = self.ba_proj(hidden).chunk(2, dim=-1)
        mixed = self.conv1d(qkv, batch, state["window"])
        # Queries and keys are normalized in one call.
        query_key, value = mixed.split([2 * keys, values], dim=-1)
        query, key = ops.l2_norm(query_key.unflatten(1, (-1, key_dim)), L2_EPS).chunk(2, dim=1)
        decay, beta = ops.delta_rule_gates(a, b, self.decay_factor, self.dt_bias)
        output = ops.gated_delta_rule(
            query,
            key,
            value.unflatten(1, (-1, value_dim)),
            decay,
            beta,
            state["matrix"],
            batch.slots,
            None,
            batch.query_start_loc,
            batch.query_start_loc_host,
            key_dim**-0.5,
        )
        return self.out_proj(self.norm(output, gate.unflatten(1, (-1, value_dim))).flatten(1))

    if TYPE_CHECKING:
        __call__ = forward


class GatedRMSNorm(nn.Module):
    """:func:`hal.ops.gated_rms_norm` with its weight ``[width]``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map ``[..., width]`` and a gate of that shape to the same shape."""
        return ops.gated_rms_norm(x, gate, self.weight, self.eps)

    if TYPE_CHECKING:
        __call__ = forward
