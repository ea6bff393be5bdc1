"""Multi-head latent attention: a cache of one latent and one rotary row of each token, for all heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs.validators import ge, optional
from torch import Tensor, nn

from hal import ops
from hal.device.group import Group
from hal.nn.choices import POSITIONS, Choice, chosen
from hal.nn.decoder_config import DecoderConfig
from hal.nn.linear import OUT, Linear, MergedLinear
from hal.nn.model import Angles, LayerState
from hal.nn.norm import RMSNorm
from hal.nn.rope_parameters import SIZE
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.weight import Share, Weight
from hal.ops import AttentionOptions
from hal.step.batch import Batch
from hal.step.state import TOKEN, LayerStates, State

LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, which no key of config.json changes in most families."""


@attrs.frozen(kw_only=True)
class LatentConfig(DecoderConfig):
    """The decoder's keys, and those of latent attention. ``head_dim`` is that of the rotated part of a head.

    Attributes:
        q_lora_rank: the size of the latent of queries; None for queries that are projected at once.
        kv_lora_rank: the size of the latent of keys and values.
        qk_nope_head_dim: elements of a head's query and key that are not rotated.
        qk_rope_head_dim: those that are, unless the layer has no rotary embedding; 0 for none.
        qk_head_dim: elements of both.
        v_head_dim: elements of a head's value.
        rope_interleave: whether the elements of a rotated pair are adjacent.
    """

    q_lora_rank: int | None = attrs.field(validator=optional(SIZE))
    kv_lora_rank: int = attrs.field(validator=SIZE)
    qk_nope_head_dim: int = attrs.field(validator=SIZE)
    qk_rope_head_dim: int = attrs.field(validator=[ge(0), SIZE[1]])
    v_head_dim: int = attrs.field(validator=SIZE)
    rope_interleave: bool = True
    head_dim: int = attrs.field()
    qk_head_dim: int = attrs.field()

    least_head_dim: ClassVar[int] = 0
    unread: ClassVar[tuple[str, ...]] = ()
    """Sizes that a family's config.json may have without effect."""

    @head_dim.default
    def _rotated(self) -> int:
        return self.qk_rope_head_dim

    @qk_head_dim.default
    def _both(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        sizes = {"head_dim": self._rotated(), "qk_head_dim": self._both()}
        for key, size in sizes.items():
            if key not in self.unread and getattr(self, key) != size:
                raise ValueError(f"{key} is {getattr(self, key)}; by the sizes of parts of a head, it must be {size}")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; with latent attention, it is num_attention_heads, "
                f"{self.num_attention_heads}"
            )

    @property
    def scale(self) -> float:
        """The factor of scores, with that of the rope parameters."""
        return float(self.qk_head_dim**-0.5) * self.rope.score_scaling

    @property
    def latent_eps(self) -> float:
        """The epsilon of the norms of latents."""
        return LATENT_EPS

    def rotary(self) -> RotaryEmbedding | None:
        """Return the rotary embedding of the rotated part of a head; None if there is none."""
        if not self.qk_rope_head_dim:
            return None
        return RotaryEmbedding(self.qk_rope_head_dim, self.rope, interleaved=self.rope_interleave)


class AbsorbedLinear(Linear):
    """The projection of a latent to each head's key and value, by which attention multiplies.

    Its weight is floating-point, also where a checkpoint quantizes it.

    Args:
        rank: the size of the latent.
        heads: the number of heads.
        key_dim: elements of a head's key.
        value_dim: elements of its value, whose rows in the weight follow those of the key.
    """

    takes_adapters = False

    def __init__(self, rank: int, heads: int, key_dim: int, value_dim: int) -> None:
        self.dims = key_dim, value_dim
        super().__init__(rank, heads * sum(self.dims), shard=OUT, share=Share(sum(self.dims)))

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of its weight, which drivers leave as it is."""
        return {"weight": self.declare("weight")}

    @property
    def by_head(self) -> tuple[Tensor, Tensor]:
        """The projections to keys ``[heads, key_dim, rank]`` and to values ``[heads, value_dim, rank]``."""
        key, value = self.weight.view(-1, sum(self.dims), self.in_features).split(self.dims, dim=1)
        return key, value


class LatentAttention(nn.Module):
    """Latent attention and its projections, in the order: project, normalize latents, rotate, attend, project.

    Ranks share the heads, and each keeps all latents.

    Args:
        config: the sizes. ``attention_bias`` says whether the projections of and to ``hidden_size`` have biases, except
            ``q_proj``.
        rotary: the rotary embedding, which layers share, and which declares the order of pairs in the cache; None for
            none, so that a head's second part has no positions either.
        index: the features of further projections of the hidden states, by name, which :meth:`select` receives.

    Attributes:
        states: the states of the layer, per token: ``latent``, and ``rope`` unless ``qk_rope_head_dim`` is 0.
        rotaries: the rotary embedding, in a tuple; empty for none.
        causal: that a query attends only to tokens up to its own.
        kept_choice: the name under which the positions are recorded or replayed; None for neither.

    Source: DeepSeek-AI, *DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model*, 2024.
    """

    causal: bool = True
    kept_choice: str | None = None

    def __init__(
        self, config: LatentConfig, rotary: RotaryEmbedding | None, index: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        super().__init__()
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        # In a tuple, so that it is a submodule of the decoder only.
        self.rotaries: tuple[RotaryEmbedding, ...] = () if rotary is None else (rotary,)
        self.query_dims = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latents = (config.q_lora_rank or 0, rank, config.qk_rope_head_dim, *index.values())
        by_head = Share(config.qk_head_dim)
        parts = {"kv_a_proj_with_mqa": rank + config.qk_rope_head_dim}
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * config.qk_head_dim, shard=OUT, share=by_head)
        else:
            parts = {"q_a_proj": config.q_lora_rank, **parts}
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_eps)
            self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim, shard=OUT, share=by_head)
        self.latent_proj = MergedLinear(hidden, {**parts, **index}, bias=config.attention_bias, shard=None)
        self.kv_a_layernorm = RMSNorm(rank, config.latent_eps)
        self.kv_b_proj = AbsorbedLinear(rank, heads, config.qk_nope_head_dim, config.v_head_dim)
        self.o_proj = Linear(
            heads * config.v_head_dim,
            hidden,
            bias=config.attention_bias,
            shard="in_features",
            share=Share(config.v_head_dim),
        )
        self.options = AttentionOptions(config.scale)
        sizes = {"latent": rank, "rope": config.qk_rope_head_dim}
        self.states: LayerStates = {name: State(TOKEN, (size,)) for name, size in sizes.items() if size}

    def split(self, tensor: Group) -> None:
        """Compute this rank's heads from now on, which the projections say."""

    @property
    def chooses(self) -> Choice | None:
        """What is recorded and replayed of it; None for attention to all positions."""
        selected = self.states["latent"].selected
        return None if selected is None else Choice(POSITIONS, (selected,))

    def forward(self, hidden: Tensor, angles: Angles, batch: Batch, state: LayerState, *further: Any) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape; see :class:`RotaryEmbedding`."""
        query, latent, key_rope, *index = self.latent_proj(hidden).split(self.latents, dim=-1)
        normed = self.q_a_layernorm(query) if self.latents[0] else hidden
        query = self.q_b_proj(normed) if self.latents[0] else self.q_proj(hidden)
        nope, query_rope = query.unflatten(1, (-1, sum(self.query_dims))).split(self.query_dims, dim=-1)
        if angles is not None:
            query_rope, turned = ops.rotary_embedding(
                query_rope, key_rope.unsqueeze(1), *angles, self.rotaries[0].interleaved
            )
            key_rope = turned.squeeze(1)
        cache = state["latent"], state["rope"] if "rope" in self.states else state["latent"][..., :0]
        ops.store_latent_cache(self.kv_a_layernorm(latent), key_rope, *cache, batch.slot_mapping)
        keys, values = self.kv_b_proj.by_head
        selected = self.select(hidden, normed, index, angles, batch, state, *further)
        if selected is not None:
            selected = chosen(self, selected)
        if selected is None:
            lengths = batch.query_start_loc, batch.kv_lens, batch.query_start_loc_host, batch.kv_lens_host
            attended = ops.multi_head_latent_attention(
                nope, query_rope, *cache, keys, values, batch.block_table, *lengths, self.options
            )
        else:
            places = selected, batch.block_table, batch.query_start_loc
            latents = ops.attend_selected(ops.head_linear(nope, keys), query_rope, *cache, *places, self.options.scale)
            attended = ops.head_linear(latents, values.transpose(1, 2))
        return self.o_proj(attended.flatten(1))

    def select(
        self,
        hidden: Tensor,
        query: Tensor,
        index: Sequence[Tensor],
        angles: Angles,
        batch: Batch,
        state: LayerState,
        *further: Any,
    ) -> Tensor | None:
        """Return the positions that each token attends to, as of :func:`hal.ops.select_keys`; None for all.

        Args:
            hidden: ``[tokens, hidden_size]``.
            query: ``[tokens, q_lora_rank]``, the normalized latent of queries; the hidden states without one.
            index: the results of the further projections.
            angles: of the rotary embedding; None without one.
            batch: the step.
            state: the layer's states.
            further: of :meth:`hal.nn.Decoder.further`.
        """
        return None

    if TYPE_CHECKING:
        __call__ = forward
