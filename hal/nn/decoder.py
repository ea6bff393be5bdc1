"""The Llama-style decoder: grouped-query attention and a gated MLP, each after a norm.

A model family subclasses its config and the layers in which it differs.

Source: Touvron et al., *LLaMA: Open and Efficient Foundation Language Models*, 2023; Ainslie et al., *GQA*, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs
from attrs.validators import ge, le
from torch import Tensor, nn

from hal import ops
from hal.config import read_model_config
from hal.device.group import Group
from hal.nn.attention import Attention
from hal.nn.embedding import Embedding
from hal.nn.linear import Linear, MergedLinear
from hal.nn.model import CausalLM, LayerState
from hal.nn.norm import RMSNorm
from hal.nn.rotary import KEYS_BESIDE, SIZE, RopeParameters, RotaryEmbedding
from hal.nn.weights.share import PADDED, Share
from hal.step.batch import Batch


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The keys of config.json that affect the computation, under the same names. Families add keys.

    ``num_key_value_heads`` defaults to ``num_attention_heads``, and ``head_dim`` to ``hidden_size`` divided by it.
    """

    vocab_size: int = attrs.field(validator=SIZE)
    hidden_size: int = attrs.field(validator=SIZE)
    intermediate_size: int = attrs.field(validator=SIZE)
    num_hidden_layers: int = attrs.field(validator=SIZE)
    num_attention_heads: int = attrs.field(validator=SIZE)
    num_key_value_heads: int = attrs.field(validator=SIZE)
    head_dim: int = attrs.field()
    max_position_embeddings: int = attrs.field(validator=SIZE)
    rms_norm_eps: float = attrs.field(default=1e-6, validator=[ge(0.0), le(1.0)])
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope: RopeParameters = attrs.field(factory=RopeParameters)

    @num_key_value_heads.default
    def _as_many_as_queries(self) -> int:
        return self.num_attention_heads

    @head_dim.default
    def _equal_parts(self) -> int:
        return self.hidden_size // max(self.num_attention_heads, 1)  # the validator rejects 0 later, by name

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.head_dim < 1 << 31 or self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; the rotary embedding needs an even number from 2 to {(1 << 31) - 2}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads, {self.num_attention_heads}, "
                f"is not a multiple of num_key_value_heads, {self.num_key_value_heads}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a checkpoint's config.json.

        Raises:
            ConfigError: a key is missing, or the model does not support a value.
        """
        others = {key: value for key, value in config.items() if key not in KEYS_BESIDE}
        return attrs.evolve(read_model_config(cls, others), rope=RopeParameters.from_config(config))


def check_window(config: Any, attribute: Any, value: int | None) -> None:
    """Validate a config's ``sliding_window``, as an attrs validator: a number of tokens, or None for all.

    Raises:
        ValueError: it is less than 1, or exceeds the longest sequence length. :func:`hal.config.read` turns it into a
            ConfigError.
    """
    if value is not None and value < 1:
        raise ValueError(f"{attribute.name} is {value}; it must be 1 or more, or null for all tokens")
    if value is not None and value >= 1 << 31:
        raise ValueError(f"{attribute.name} is {value}; it must be less than {1 << 31}, or null for all tokens")


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions and its projections.

    Args:
        config: the sizes.
        sliding_window: the number of tokens that a query attends to, including its own; None for all.
        bias: whether the projections of query, key and value have biases, and whether that of the output has one; None
            for ``config.attention_bias``.
    """

    def __init__(
        self, config: DecoderConfig, *, sliding_window: int | None = None, bias: tuple[bool, bool] | None = None
    ) -> None:
        super().__init__()
        self.head_dim, kv_heads = config.head_dim, config.num_key_value_heads
        width, kv_width = config.num_attention_heads * self.head_dim, kv_heads * self.head_dim
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        qkv_bias, output_bias = bias or (config.attention_bias, config.attention_bias)
        by_head = Share(self.head_dim, repeat=True)
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=qkv_bias, share=by_head)
        self.attention = Attention(kv_heads, self.head_dim, sliding_window=sliding_window)
        self.o_proj = Linear(
            width, config.hidden_size, bias=output_bias, shard="in_features", share=Share(self.head_dim)
        )

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query and key, ``[tokens, heads, head_dim]``. A family overrides it to transform the heads before."""
        return ops.rotary_embedding(query, key, cos, sin)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch, state: LayerState) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape; see :class:`RotaryEmbedding` and :class:`Attention`."""
        sizes = self.qkv_proj.sizes
        heads, kv_heads = sizes[0] // self.head_dim, sizes[1] // self.head_dim
        query, key, value = self.qkv_proj(hidden).split(sizes, dim=-1)
        query, key = query.view(-1, heads, self.head_dim), key.view(-1, kv_heads, self.head_dim)
        query, key = self.rotate(query, key, cos, sin)
        value = value.view(-1, kv_heads, self.head_dim)
        return self.o_proj(self.attention(query, key, value, batch, state))

    if TYPE_CHECKING:
        __call__ = forward


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the SwiGLU of Shazeer, *GLU Variants Improve Transformer*, 2020."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, shard="in_features")

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(hidden)))

    if TYPE_CHECKING:
        __call__ = forward


class DecoderLayer(nn.Module):
    """``hidden + attention(norm(hidden))``, then ``hidden + mlp(norm(hidden))``.

    Args:
        config: the sizes.
        attention: the attention.
        mlp: maps ``[tokens, hidden_size]`` to the same shape.
        mlp_name: the name of the MLP in the checkpoint.
    """

    def __init__(
        self, config: DecoderConfig, attention: SelfAttention, mlp: nn.Module, *, mlp_name: str = "mlp"
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_module(mlp_name, mlp)
        self._mlp_name = mlp_name

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Batch, state: LayerState) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, batch, state)
        mlp = getattr(self, self._mlp_name)
        output: Tensor = hidden + mlp(self.post_attention_layernorm(hidden))
        return output

    if TYPE_CHECKING:
        __call__ = forward


class Decoder(nn.Module):
    """Maps tokens to normalized hidden states. All layers share one cos and sin."""

    def __init__(self, config: DecoderConfig, layers: Iterable[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        """Return the hidden states, ``[tokens, hidden_size]``."""
        hidden = self.embed_tokens(batch.token_ids)
        cos, sin = self.rotary(batch.positions, hidden.dtype)
        for layer, state in zip(self.layers, states, strict=True):
            hidden = layer(hidden, cos, sin, batch, state)
        return self.norm(hidden)

    if TYPE_CHECKING:
        __call__ = forward


class DecoderLM(CausalLM):
    """A :class:`Decoder` and its output projection, which may be tied to the embedding. Ranks may split it.

    Args:
        config: the checkpoint's config.
        layers: ``config.num_hidden_layers`` layers.
    """

    def __init__(self, config: DecoderConfig, layers: Iterable[DecoderLayer]) -> None:
        super().__init__()
        self.vocab_size, self.max_length = config.vocab_size, config.rope.longest(config.max_position_embeddings)
        made = list(layers)
        self.model = Decoder(config, made)
        self._attention = [layer.self_attn.attention for layer in made]
        self.states = [each.states for each in self._attention]
        if config.tie_word_embeddings:
            self.tied = {"lm_head.weight": "model.embed_tokens.weight"}
        else:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, shard="out_features", share=PADDED, gather=True
            )

    def split(self, tensor: Group) -> None:
        """Declare the states of this rank's heads. The layers are split already."""
        self.states = [each.states for each in self._attention]

    def forward(self, batch: Batch, states: Sequence[LayerState]) -> Tensor:
        return self.model(batch, states)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.embed_tokens.as_linear(hidden) if self.tied else self.lm_head(hidden)

    if TYPE_CHECKING:
        __call__ = forward
