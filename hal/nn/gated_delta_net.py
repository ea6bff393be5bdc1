"""The gated delta network, a recurrent layer in the place of attention, and its keys in config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import torch
from attrs.validators import ge, le
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.decoder_config import FULL, DecoderConfig, check_layer_types
from hal.nn.linear import Linear, MergedLinear
from hal.nn.model import LayerState
from hal.nn.rope_parameters import SIZE
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.assembly import Assembly, Concatenated, Merged
from hal.nn.weights.weight import Consumer, Share, Weight, unshared
from hal.step.model_batches import SlotBatch
from hal.step.state import SEQUENCE, LayerStates, State

L2_EPS = 1e-6
RECURRENT: Final[Literal["linear_attention"]] = "linear_attention"
GateActivation = Literal["silu", "sigmoid"]
"""The functions of the gate of a recurrent layer's values."""
HybridLayerType = Literal["full_attention", "linear_attention"]
"""The entries of ``layer_types`` in config.json of a model with recurrent layers."""


@attrs.frozen(kw_only=True)
class DeltaNetConfig(DecoderConfig):
    """The decoder's keys, those of its gated delta networks, and those that select the layers with them.

    Without ``layer_types``, each ``full_attention_interval``-th layer has attention. ``mamba_ssm_dtype`` is the dtype
    of the networks' matrices: float32, or else that of the model's weights.
    """

    full_attention_interval: int = attrs.field(default=4, validator=ge(1))
    layer_types: tuple[HybridLayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)
    linear_conv_kernel_dim: int = attrs.field(default=4, validator=[ge(2), le(4)])
    linear_key_head_dim: int = attrs.field(default=128, validator=SIZE)
    linear_value_head_dim: int = attrs.field(default=128, validator=SIZE)
    linear_num_key_heads: int = attrs.field(default=16, validator=SIZE)
    linear_num_value_heads: int = attrs.field(default=32, validator=SIZE)
    mamba_ssm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise ValueError(f"linear_num_value_heads, {values}, is not a multiple of linear_num_key_heads, {keys}")

    @property
    def types(self) -> tuple[HybridLayerType, ...]:
        """The type of each layer."""
        layers = range(1, self.num_hidden_layers + 1)
        return self.layer_types or tuple(RECURRENT if each % self.full_attention_interval else FULL for each in layers)

    @property
    def parts(self) -> Mapping[str, int]:
        """The features of all heads: of queries, keys, values, and the gates of the values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        return {"query": keys, "key": keys, "value": values, "gate": values}


def negative_exponential(x: Tensor) -> Tensor:
    """Return the factor of decays, of its negative logarithm ``A_log`` in the checkpoint."""
    return -x.exp()


class ShortConvolution(nn.Module):
    """The weights of :func:`hal.ops.causal_conv1d`, from those of a depthwise convolution without bias.

    Args:
        parts: the channels of each part, of which ranks have equal shares.
        width: tokens that it sees.
        layers: the checkpoint's layers beside this one, if it has one for each part.
        dilation: the distance of the tokens that it sees.
        shard: whether ranks share the channels.
    """

    def __init__(
        self, parts: Sequence[int], width: int, layers: Sequence[str] = (), *, dilation: int = 1, shard: bool = True
    ) -> None:
        super().__init__()
        self.parts, self.layers, self.dilation, self.shard = tuple(parts), tuple(layers), dilation, shard
        self.weight = nn.Parameter(torch.empty(width, 1, sum(parts)), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of its weight, ``[channels, 1, width]`` in the checkpoint."""
        order, sources = ("channels", "one", "width"), tuple(f".{each}.weight" for each in self.layers)
        assembly: Assembly = Merged("channels", self.parts, order)
        if sources:
            assembly = Concatenated("channels", self.parts, Merged("channels", self.parts[:1], order))
        consumer = Consumer("causal_conv1d", "weight")
        shard = "channels" if self.shard else None
        return {"weight": Weight(sources or ("weight",), "width one channels", shard, assembly, consumer)}

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
            *batch.state_slots,
            batch.query_start_loc,
            batch.query_start_loc_host,
            True,
            self.dilation,
        )

    if TYPE_CHECKING:
        __call__ = forward


def _rows(parts: Mapping[str, int], layers: Mapping[str, Sequence[str]], groups: int) -> list[tuple[str, int, int]]:
    """Return where a checkpoint's layers have the rows of some parts; see :class:`MergedLinear`."""
    found = {}
    for layer, names in layers.items():
        sizes = [parts.get(name, 0) // groups for name in names]
        for place, name in enumerate(names):
            first, step = sum(sizes[:place]), sum(sizes)
            found[name] = [(layer, group * step + first, sizes[place]) for group in range(groups)]
    return [row for part in parts for row in found[part]]


class GatedDeltaNet(nn.Module):
    """A gated delta network with its projections: project, convolve, apply the delta rule, normalize, gate, project.

    It keeps, for each sequence, a matrix per value head, and the last rows that the convolution sees. Ranks share its
    key heads, each with its value heads.

    Args:
        config: heads, their sizes, and the dtype of the matrices.
        layers: the checkpoint's projections, each with the parts whose rows it has: of ``query``, ``key``, ``value``,
            ``gate``, and ``b`` and ``a`` of :func:`hal.ops.delta_rule_gates`.
        grouped: whether a projection has the rows of each key head together; else those of each part.
        activation: the function of the gate of the values.

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
        config: DeltaNetConfig,
        layers: Mapping[str, Sequence[str]],
        *,
        grouped: bool = False,
        activation: GateActivation = "silu",
    ) -> None:
        super().__init__()
        self.config = config
        hidden, heads, qkvz = config.hidden_size, config.linear_num_value_heads, config.parts
        ba, groups = {"b": heads, "a": heads}, config.linear_num_key_heads if grouped else 1
        self.qkvz_proj = MergedLinear(hidden, qkvz, rows=_rows(qkvz, layers, groups))
        self.ba_proj = MergedLinear(hidden, ba, rows=_rows(ba, layers, groups))
        self.conv1d = ShortConvolution(tuple(qkvz.values())[:3], config.linear_conv_kernel_dim)
        self.decay_factor = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps, activation)
        self.out_proj = Linear(qkvz["value"], hidden, shard="in_features")
        self.states = self._states(1)

    def _states(self, ranks: int) -> LayerStates:
        config, channels = self.config, sum(self.conv1d.parts) // ranks
        heads = config.linear_num_value_heads // ranks, config.linear_value_head_dim, config.linear_key_head_dim
        dtype = torch.float32 if config.mamba_ssm_dtype == "float32" else None
        return {
            "matrix": State(SEQUENCE, heads, dtype=dtype, saved=True),
            "window": State(SEQUENCE, (config.linear_conv_kernel_dim - 1, channels), saved=True),
        }

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its own tensors, in float32."""
        share = Share(self.config.linear_num_value_heads // self.config.linear_num_key_heads)
        bias = Weight(("dt_bias",), "heads", "heads", dtype=torch.float32, share=share)
        decay = attrs.evolve(bias, sources=("A_log",), function=negative_exponential)
        return {"decay_factor": decay, "dt_bias": bias}

    def split(self, tensor: Group) -> None:
        """Compute this rank's heads from now on.

        Raises:
            ConfigError: the ranks cannot share the key heads.
        """
        heads = self.config.linear_num_key_heads
        if heads % tensor.size:
            divisors = [each for each in range(1, heads + 1) if heads % each == 0]
            raise unshared(
                f"{tensor.size} ranks cannot share the {heads} key heads of a recurrent layer equally",
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
        key_dim, value_dim = self.config.linear_key_head_dim, self.config.linear_value_head_dim
        keys, _, values, _ = self.qkvz_proj.sizes
        qkv, gate = self.qkvz_proj(hidden).split([2 * keys + values, values], dim=-1)
        b, a = self.ba_proj(hidden).chunk(2, dim=-1)
        mixed = self.conv1d(qkv, batch, state["window"])
        # Queries and keys are normalized in one call.
        query_key, value = mixed.split([2 * keys, values], dim=-1)
        query, key = ops.l2_norm(query_key.unflatten(1, (-1, key_dim)), L2_EPS).chunk(2, dim=1)
        decay, beta = ops.delta_rule_gates(a, b, self.decay_factor, self.dt_bias)
        read_slots, write_slots = batch.state_slots
        output = ops.gated_delta_rule(
            query,
            key,
            value.unflatten(1, (-1, value_dim)),
            decay,
            beta,
            state["matrix"],
            read_slots,
            write_slots,
            batch.query_start_loc,
            batch.query_start_loc_host,
            key_dim**-0.5,
        )
        return self.out_proj(self.norm(output, gate.unflatten(1, (-1, value_dim))).flatten(1))

    if TYPE_CHECKING:
        __call__ = forward


class GatedRMSNorm(nn.Module):
    """:func:`hal.ops.gated_rms_norm` with its weight ``[width]``, or with another function of the gate."""

    def __init__(self, width: int, eps: float, activation: GateActivation = "silu") -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map ``[..., width]`` and a gate of that shape to the same shape."""
        if self.activation == "sigmoid":
            return ops.rms_norm(x, self.weight, self.eps) * ops.pointwise(gate, "sigmoid")
        return ops.gated_rms_norm(x, gate, self.weight, self.eps)

    if TYPE_CHECKING:
        __call__ = forward
