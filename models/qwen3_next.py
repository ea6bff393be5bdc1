"""Qwen3-Next: three layers of a gated delta network to one of gated attention, each with a mixture of experts.

Source: Qwen Team, *Qwen3-Next: Towards Ultimate Training & Inference Efficiency*, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Self

import attrs
from attrs.validators import deep_iterable, ge
from torch import nn

from hal.nn import (
    FULL,
    DecoderConfig,
    DecoderLayer,
    DecoderLM,
    DeltaNetSizes,
    GatedDeltaNet,
    GatedMLP,
    RMSNorm,
    RotaryEmbedding,
    Router,
    SelfAttention,
    SparseMLP,
    check_layer_types,
)
from hal.step import SlotBatch

HybridLayerType = Literal["full_attention", "linear_attention"]
Rows = Sequence[tuple[str, int, int]]
"""Where a checkpoint has the rows of a projection; see :class:`hal.nn.MergedLinear`."""


@attrs.frozen(kw_only=True)
class HybridConfig(DecoderConfig):
    """The decoder's keys, and those of its recurrent layers.

    Without ``layer_types``, each ``full_attention_interval``-th layer has attention. ``mamba_ssm_dtype`` is the dtype
    of the recurrent layers' matrices: float32, or else that of the model's weights.
    """

    partial_rotary = True
    hidden_act: Literal["silu"] = "silu"
    head_dim: int = 256
    attn_output_gate: Literal[True] = True
    full_attention_interval: int = attrs.field(default=4, validator=ge(1))
    layer_types: tuple[HybridLayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mamba_ssm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    use_sliding_window: Literal[False] = False
    mlp_only_layers: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(ge(0)))
    # Layers that predict further tokens, which the model does not compute.
    mtp_num_hidden_layers: int = attrs.field(default=0, validator=ge(0))
    mtp_use_dedicated_embeddings: bool = False
    sizes: DeltaNetSizes = attrs.field(init=False)

    @sizes.default
    def _sizes(self) -> DeltaNetSizes:
        return DeltaNetSizes(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_width=self.linear_conv_kernel_dim,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``partial_rotary_factor``, a quarter of each head is rotated."""
        part = config.get("partial_rotary_factor")
        return super().from_config({**config, "partial_rotary_factor": 0.25 if part is None else part}, layer_type)

    @property
    def types(self) -> tuple[HybridLayerType, ...]:
        """The type of each layer."""
        layers = range(1, self.num_hidden_layers + 1)
        return self.layer_types or tuple(
            "linear_attention" if layer % self.full_attention_interval else FULL for layer in layers
        )


class HybridLM(DecoderLM):
    """A decoder of recurrent layers and of gated attention. It does not compute the layers that predict further tokens.

    Args:
        config: the sizes.
        mlp: makes the MLP of a layer.
        qkvz: see :class:`hal.nn.GatedDeltaNet`.
        ba: see there.
        rotary: of the attention; None for positions along one axis.
    """

    other_names = MappingProxyType({".linear_attn.": ".self_attn.", ".shared_expert.": ".shared_experts."})
    ignored_prefixes: tuple[str, ...] = ("mtp.",)

    def __init__(
        self,
        config: HybridConfig,
        mlp: Callable[[int], nn.Module],
        qkvz: Rows,
        ba: Rows,
        rotary: RotaryEmbedding | None = None,
    ) -> None:
        rotary = rotary or RotaryEmbedding(config.head_dim, config.rope)
        norm = partial(RMSNorm, eps=config.rms_norm_eps, offset=1.0)

        def layers() -> Iterator[DecoderLayer]:
            for index, kind in enumerate(config.types):
                mixer: SelfAttention | GatedDeltaNet
                if kind == FULL:
                    mixer = SelfAttention(config, rotary, norm=norm, gate=True)
                else:
                    in_float32 = {} if config.mamba_ssm_dtype == "float32" else {"state_dtype": None}
                    eps = config.rms_norm_eps
                    mixer = GatedDeltaNet(config.hidden_size, config.sizes, eps=eps, qkvz=qkvz, ba=ba, **in_float32)
                yield DecoderLayer(config, mixer, mlp(index), norm=norm)

        super().__init__(config, layers(), norm=norm)
        if len({*config.types} - {FULL}):
            self.batch_type = SlotBatch


@attrs.frozen(kw_only=True)
class HybridMoeConfig(HybridConfig):
    """The keys of the experts, of which each token takes some, and of the one that every token takes."""

    intermediate_size: int = attrs.field(default=5632, validator=ge(1))
    num_experts: int = attrs.field(default=512, validator=ge(0))
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = attrs.field(default=512, validator=ge(1))
    shared_expert_intermediate_size: int = attrs.field(default=512, validator=ge(1))
    norm_topk_prob: bool = True
    decoder_sparse_step: int = attrs.field(default=1, validator=ge(1))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Version 5 of transformers writes num_experts as num_local_experts."""
        given = dict(config)
        if "num_local_experts" in given:
            given.setdefault("num_experts", given.pop("num_local_experts"))
        return super().from_config(given, layer_type)

    def mlp(self, layer: int) -> nn.Module:
        """Return the MLP of a layer, dense or sparse."""
        if not self.num_experts or layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
            return GatedMLP(self.hidden_size, self.intermediate_size)
        router = Router(self.hidden_size, self.num_experts, self.num_experts_per_tok, renormalize=self.norm_topk_prob)
        shared = GatedMLP(self.hidden_size, self.shared_expert_intermediate_size)
        return SparseMLP(router, self.moe_intermediate_size, shared_experts=shared, shared_gate=True)


def grouped_rows(layer: str, heads: int, parts: Sequence[int]) -> Rows:
    """Return where the rows of each part are in a checkpoint's layer that has all parts of each head together.

    Args:
        layer: its name.
        heads: the number of heads.
        parts: the rows of each part, of all heads.
    """
    sizes = [part // heads for part in parts]
    return [
        (layer, head * sum(sizes) + sum(sizes[:part]), size) for part, size in enumerate(sizes) for head in range(heads)
    ]


class Qwen3NextForCausalLM(HybridLM):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        qwen = HybridMoeConfig.from_config(config)
        heads, values = qwen.linear_num_key_heads, qwen.linear_num_value_heads
        qkvz = grouped_rows("in_proj_qkvz", heads, tuple(qwen.sizes.parts.values()))
        return cls(qwen, qwen.mlp, qkvz, grouped_rows("in_proj_ba", heads, (values, values)))
