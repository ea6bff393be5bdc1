"""Qwen3-Next: three layers of a gated delta network to one of gated attention, each with a mixture of experts.

Source: Qwen Team, *Qwen3-Next: Towards Ultimate Training & Inference Efficiency*, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import attrs
from attrs.validators import deep_iterable, ge
from torch import nn

from hal.nn import (
    FULL,
    RECURRENT,
    DecoderLayer,
    DecoderLM,
    DeltaNetConfig,
    GatedDeltaNet,
    GatedMLP,
    Mixer,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)

from .qwen2_moe import SharedExpertConfig


@attrs.frozen(kw_only=True)
class HybridConfig(DeltaNetConfig):
    """The decoder's keys, and those of Qwen's hybrid models."""

    partial_rotary = True
    hidden_act: Literal["silu"] = "silu"
    head_dim: int = 256
    attn_output_gate: Literal[True] = True
    use_sliding_window: Literal[False] = False
    mlp_only_layers: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(ge(0)))
    # Layers that predict further tokens, which the model does not compute.
    mtp_num_hidden_layers: int = attrs.field(default=0, validator=ge(0))
    mtp_use_dedicated_embeddings: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``partial_rotary_factor``, a quarter of each head is rotated."""
        return super().from_config(cls.with_defaults(config, partial_rotary_factor=0.25), layer_type)

    def mlp(self, layer: int) -> nn.Module:
        """Return the MLP of a layer."""
        return GatedMLP(self.hidden_size, self.intermediate_size)


@attrs.frozen(kw_only=True)
class HybridMoeConfig(SharedExpertConfig, HybridConfig):
    """The keys of recurrent layers and of experts."""

    intermediate_size: int = attrs.field(default=5632, validator=ge(1))
    num_experts: int = attrs.field(default=512, validator=ge(0))
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = attrs.field(default=512, validator=ge(1))
    shared_expert_intermediate_size: int = attrs.field(default=512, validator=ge(1))
    norm_topk_prob: bool = True


class HybridLM(DecoderLM):
    """A decoder of recurrent layers and of gated attention. It does not compute the layers that predict further tokens.

    Attributes:
        projections: those of a recurrent layer in the checkpoint; see :class:`hal.nn.GatedDeltaNet`.
        grouped: see there.

    Args:
        config: the sizes.
        rotary: of the attention; None for positions along one axis.
    """

    other_names = MappingProxyType({".linear_attn.": ".self_attn.", ".shared_expert.": ".shared_experts."})
    ignored_prefixes: tuple[str, ...] = ("mtp.",)
    projections: ClassVar[Mapping[str, Sequence[str]]] = MappingProxyType(
        {"in_proj_qkvz": ("query", "key", "value", "gate"), "in_proj_ba": ("b", "a")}
    )
    grouped: ClassVar[bool] = True

    def __init__(self, config: HybridConfig, rotary: RotaryEmbedding | None = None) -> None:
        rotary = rotary or RotaryEmbedding(config.head_dim, config.rope)
        norm = partial(RMSNorm, eps=config.rms_norm_eps, offset=1.0)
        mixers: Mapping[str, Callable[[], Mixer]] = {
            FULL: lambda: SelfAttention(config, rotary, norm=norm, gate=True),
            RECURRENT: lambda: GatedDeltaNet(config, self.projections, grouped=self.grouped),
        }
        parts = ((mixers[kind](), config.mlp(index)) for index, kind in enumerate(config.types))
        super().__init__(config, (DecoderLayer(config, *each, norm=norm) for each in parts), norm=norm)


class Qwen3NextForCausalLM(HybridLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(HybridMoeConfig.from_config(config))
