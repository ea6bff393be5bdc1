"""Gemma 4, its text model: layers that share keys and values, embeddings for each layer, and perhaps experts.

Full layers have wider heads than those with a window, and may take keys as values. The last layers read the keys and
values of an earlier layer of their type. A mixture of experts stands beside each dense MLP.

Source: Gemma Team, the model card and the published code of Gemma 4, 2026.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs
import torch
from attrs.validators import ge, optional
from torch import Tensor, nn

from hal import ops
from hal.nn import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    ActivationName,
    AlternatingConfig,
    Angles,
    Attention,
    Decoder,
    DecoderLayer,
    DecoderLM,
    Embedding,
    Experts,
    GatedMLP,
    LayerState,
    LayerType,
    Linear,
    MergedLinear,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    Router,
    SelfAttention,
    Share,
    Weight,
    check_window,
    text_config,
)
from hal.nn.mlp import ACTIVATIONS
from hal.ops import AttentionOptions
from hal.step import Batch

from .gemma2 import BOUND


@attrs.frozen(kw_only=True)
class Gemma4Config(AlternatingConfig):
    """The decoder's keys, and those of both types of layers, of embeddings for each layer, and of experts.

    Attributes:
        global_head_dim: elements per head of full layers.
        num_global_key_value_heads: key heads of full layers that take keys as values; None for those of all.
        attention_k_eq_v: whether full layers take keys as values.
        num_kv_shared_layers: the number of layers, the last ones, that read other layers' keys and values.
        use_double_wide_mlp: whether those have MLPs of twice the width.
        hidden_size_per_layer_input: features of the embeddings for each layer; 0 for none.
        enable_moe_block: whether there are experts beside each MLP.
        per_layer_config: the sizes of full layers by number, as version 5 of transformers writes them.
    """

    partial_rotary = True
    head_dim: int = 256
    hidden_act: ActivationName = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: int | None = attrs.field(default=512, validator=check_window)
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = attrs.field(default=0, validator=ge(0))
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = attrs.field(default=256, validator=ge(0))
    vocab_size_per_layer_input: int = attrs.field(default=262144, validator=ge(1))
    enable_moe_block: bool = False
    num_experts: int | None = attrs.field(default=None, validator=optional(ge(1)))
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    final_logit_softcapping: float | None = attrs.field(default=None, validator=BOUND)
    use_bidirectional_attention: Literal["vision"] | None = None  # in images, which hal does not read
    per_layer_config: dict[str, dict[str, int]] | None = attrs.field(default=None)
    local_rope: RopeParameters = attrs.field(factory=RopeParameters)

    @per_layer_config.validator
    def _of_full_layers(self, attribute: Any, value: dict[str, dict[str, int]] | None) -> None:
        full, sizes = {str(index) for index, kind in enumerate(self.kinds) if kind == FULL}, [*(value or {}).values()]
        known = all(each == sizes[0] and each.keys() <= {"head_dim", "num_key_value_heads"} for each in sizes)
        if value and (value.keys() != full or not known):
            raise ValueError("per_layer_config has something else than the same sizes of heads for all full layers")

    @num_kv_shared_layers.validator
    def _others_have_their_type(self, attribute: Any, value: int) -> None:
        if value and {*self.kinds} != {*self.kinds[: max(self.num_hidden_layers - value, 0)]}:
            raise ValueError(f"num_kv_shared_layers is {value}, and no layer before the last {value} has their type")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = FULL) -> Self:
        """Read a checkpoint's config.json."""
        given = dict(config)
        if "hidden_activation" in given:
            given["hidden_act"] = given.pop("hidden_activation")
        if given.get("rope_parameters") in (None, {}):
            theta = cls.with_defaults(given, rope_theta=1e6)["rope_theta"]
            full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": theta}
            given["rope_parameters"] = {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
        local = RopeParameters.from_config(given, SLIDING)
        return attrs.evolve(super().from_config(given, layer_type), local_rope=local)

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """The type of each layer. The last one is full."""
        return (*self.types(full_every=6)[:-1], FULL)

    def source(self, layer: int) -> int:
        """Return the number of the layer whose keys and values a layer reads, its own for most."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < first:
            return layer
        return max(index for index in range(first) if self.kinds[index] == self.kinds[layer])

    def sized(self, kind: LayerType) -> Self:
        """Return the config with the sizes of one type of layers as those of all."""
        if kind == SLIDING:
            return self
        few = self.num_global_key_value_heads if self.attention_k_eq_v else None
        width, heads = self.global_head_dim, few or self.num_key_value_heads
        if self.per_layer_config is not None:
            sizes = next(iter(self.per_layer_config.values()), {})
            width, heads = sizes.get("head_dim", self.head_dim), sizes.get("num_key_value_heads", heads)
        return attrs.evolve(self, head_dim=width, num_key_value_heads=heads)


class Gemma4Attention(SelfAttention):
    """Scores without a scale, norms of query, key and value, and perhaps another layer's keys and values.

    Args:
        config: of one type of layers; see :meth:`Gemma4Config.sized`.
        rotary: the rotary embedding.
        window: see :class:`SelfAttention`.
        shared: whether the layer reads another layer's keys and values.
        key_as_value: whether keys are values, too, before their norm.
    """

    def __init__(
        self,
        config: Gemma4Config,
        rotary: RotaryEmbedding,
        *,
        window: int | None,
        shared: bool,
        key_as_value: bool,
    ) -> None:
        norm = partial(RMSNorm, eps=config.rms_norm_eps)
        super().__init__(config, rotary, window=window, scale=1.0, norm=norm)
        parts = self.qkv_proj.parts
        if shared:
            parts = {"q_proj": parts["q_proj"]}
            del self.k_norm
        elif key_as_value:
            parts = {name: parts[name] for name in ("q_proj", "k_proj")}
        by_head = Share(config.head_dim, repeat=True)
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.attention_bias, share=by_head)
        self.attention = Attention(
            config.num_key_value_heads, config.head_dim, AttentionOptions(1.0, window), shared=shared
        )
        self.v_norm = norm(config.head_dim, learned=False) if not shared else None

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState) -> Tensor:
        assert angles is not None
        heads = [self._heads(each) for each in self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)]
        query, key, value = self.q_norm(heads[0]), None, None
        if self.v_norm is None:
            query, _ = ops.rotary_embedding(query, query[:, :0], *angles, False)
        else:
            query, key = ops.rotary_embedding(query, self.k_norm(heads[1]), *angles, False)
            value = self.v_norm(heads[-1])
        output: Tensor = self.o_proj(self.attention(query, key, value, batch, state))
        return output


class Gemma4Router(Router):
    """A router of normalized and scaled tokens, whose weights have a factor for each expert."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__(config.hidden_size, config.num_experts or 0, config.top_k_experts or 0, renormalize=True)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, learned=False)
        self.root = config.hidden_size**-0.5
        self.scale = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.per_expert_scale = nn.Parameter(torch.empty(self.out_features), requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        scales = {"scale": Weight(("scale",), "in_features")}
        return {**super().weights, **scales, "per_expert_scale": Weight(("per_expert_scale",), "out_features")}

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = super().choose(self.norm(hidden) * self.scale * self.root)
        return weights * ops.embedding(experts.flatten(), self.per_expert_scale[:, None]).view_as(weights), experts


class Gemma4Layer(DecoderLayer):
    """A layer with an embedding of each token for this layer, and perhaps with experts beside the MLP."""

    def __init__(self, config: Gemma4Config, attention: SelfAttention, width: int) -> None:
        norm = partial(RMSNorm, eps=config.rms_norm_eps)
        mlp = GatedMLP(config.hidden_size, width, activation=config.hidden_act)
        super().__init__(config, attention, mlp, norm=norm, norms=SANDWICH_NORMS)
        self.layer_scalar = nn.Parameter(torch.empty(1), requires_grad=False)
        self.router = None
        if config.enable_moe_block:
            self.router = Gemma4Router(config)
            sizes = self.router.out_features, config.hidden_size, config.moe_intermediate_size or 0
            self.experts = Experts(*sizes, activation=config.hidden_act)
            self.post_feedforward_layernorm_1 = norm(config.hidden_size)
            self.pre_feedforward_layernorm_2 = norm(config.hidden_size)
            self.post_feedforward_layernorm_2 = norm(config.hidden_size)
        if features := config.hidden_size_per_layer_input:
            self.activation = ACTIVATIONS[config.hidden_act]
            self.per_layer_input_gate = Linear(config.hidden_size, features)
            self.per_layer_projection = Linear(features, config.hidden_size)
            self.post_per_layer_input_norm = norm(config.hidden_size)

    def forward(
        self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, embedding: Tensor | None = None
    ) -> Tensor:
        hidden = super().forward(hidden, angles, batch, state)
        if embedding is not None:
            gated = self.activation(self.per_layer_input_gate(hidden)) * embedding
            hidden = hidden + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return hidden * self.layer_scalar

    def feed_forward(self, hidden: Tensor, normed: Tensor) -> Tensor:
        dense = super().feed_forward(hidden, normed)
        if self.router is None:
            return dense
        sparse = self.experts(self.pre_feedforward_layernorm_2(hidden), *self.router.choose(hidden))
        output: Tensor = self.post_feedforward_layernorm_1(dense) + self.post_feedforward_layernorm_2(sparse)
        return output

    if TYPE_CHECKING:
        __call__ = forward


class Gemma4Decoder(Decoder):
    """A decoder that gives each layer an embedding of its own, of the token and of its first hidden state."""

    def __init__(self, config: Gemma4Config, layers: Iterable[DecoderLayer], **options: Any) -> None:
        super().__init__(config, layers, **options)
        self.sources = [config.source(layer) for layer in range(config.num_hidden_layers)]
        self.features = config.hidden_size_per_layer_input
        if self.features:
            width = config.num_hidden_layers * self.features
            self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, width, self.features**0.5)
            self.per_layer_model_projection = Linear(config.hidden_size, width)
            self.per_layer_projection_norm = RMSNorm(self.features, config.rms_norm_eps)
            self.state_factor = config.hidden_size**-0.5

    def further(self, batch: Batch, embeddings: Tensor) -> Sequence[tuple[Tensor, ...]]:
        if not self.features:
            return super().further(batch, embeddings)
        tokens = self.embed_tokens_per_layer(batch.token_ids)
        states = self.per_layer_model_projection(embeddings) * self.state_factor
        normed = self.per_layer_projection_norm(states.view(-1, len(self.layers), self.features))
        both = (normed + tokens.view_as(normed)) * 2.0**-0.5
        return [(each,) for each in both.unbind(1)]

    def stored(self, layer: int) -> int:
        return self.sources[layer]


class Gemma4ForCausalLM(DecoderLM):
    decoder = Gemma4Decoder
    other_names = MappingProxyType({".router.proj.": ".router."})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        gemma = Gemma4Config.from_config(config)
        kinds: tuple[LayerType, ...] = (FULL, SLIDING)
        ropes, sized = {FULL: gemma.rope, SLIDING: gemma.local_rope}, {kind: gemma.sized(kind) for kind in kinds}
        rotary = {kind: RotaryEmbedding(sized[kind].head_dim, ropes[kind]) for kind in kinds}

        def layer(index: int) -> DecoderLayer:
            kind, shared = gemma.kinds[index], gemma.source(index) != index
            values = {"shared": shared, "key_as_value": gemma.attention_k_eq_v and kind == FULL}
            attention = Gemma4Attention(sized[kind], rotary[kind], window=gemma.windows[kind], **values)
            wide = shared and gemma.use_double_wide_mlp
            return Gemma4Layer(gemma, attention, gemma.intermediate_size * (2 if wide else 1))

        model = cls(
            gemma,
            map(layer, range(gemma.num_hidden_layers)),
            embedding_multiplier=gemma.hidden_size**0.5,
            softcap=gemma.final_logit_softcapping,
        )
        reading = [index for index in range(gemma.num_hidden_layers) if gemma.source(index) != index]
        unused = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        prefixes = tuple(f"model.layers.{index}.self_attn." for index in reading)
        model.ignored_prefixes += tuple(prefix + name for prefix in prefixes for name in unused)
        return model


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text model of a checkpoint that can also read images, and perhaps sound."""

    other_names = MappingProxyType({**Gemma4ForCausalLM.other_names, "model.language_model.": "model."})
    ignored_prefixes = tuple(
        f"{prefix}{part}."
        for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        for prefix in ("", "model.")
    )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(text_config(config))
