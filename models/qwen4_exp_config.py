"""The keys of Qwen3.8-Flash-Next's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs
from attrs.validators import deep_iterable, ge, le

from hal.nn import FULL, RECURRENT, GateActivation
from hal.nn.rope_parameters import SIZE

from .qwen3_next import HybridMoeConfig

INDEXED = "indexed_attention"
"""What transformers writes in ``layer_types`` for the layers that are published as ``full_attention``."""


@attrs.frozen(kw_only=True)
class Qwen4ExpConfig(HybridMoeConfig):
    """The keys of Qwen3-Next, and those of residual streams, of the index, and of the n-grams.

    Attributes:
        output_gate_type: the function of the gate of a recurrent layer's values.
        hc_count: the number of residual streams.
        hc_lowrank: features between the projections of a gate of the streams.
        indexer_n_heads: the number of index queries; there is one index key for all.
        indexer_head_dim: elements of an index query and key.
        indexer_budget: the number of tokens of the groups that a token attends to.
        indexer_compress_ratio: the number of tokens of a group.
        ple_layer_ids: the recurrent layers with embeddings of n-grams, numbered from 1 on.
        ple_embed_dim: features of all embeddings that a token looks up in a layer.
        ple_conv_kernel_size: the tokens that the convolution of the embeddings sees, at distances of ``ngram_size``.
        ngram_size: the tokens of the longest n-gram.
        heads_per_ngram: the tables for each number of tokens.
        ngram_vocab_size_base: a table has the next unused prime number of rows from this one on.
        make_ngram_vocab_size_divisible_by: the rows of a layer's tables are padded to a multiple of it.
        seed: of the hashes of n-grams.
        split_ngram_parts: the number of tensors that have the rows of a layer's tables in the checkpoint.
        eos_token_id: the token that ends a text, which n-grams do not cross; the first one of several.
    """

    output_gate_type: GateActivation = "silu"
    hc_count: int = attrs.field(default=4, validator=[ge(2), le(64)])
    hc_lowrank: int = attrs.field(default=320, validator=SIZE)
    indexer_n_heads: int = attrs.field(validator=SIZE)
    indexer_kv_heads: Literal[1] = 1
    indexer_head_dim: int = attrs.field(validator=SIZE)
    indexer_budget: int = attrs.field(validator=SIZE)
    indexer_compress_ratio: int = attrs.field(validator=SIZE)
    ple_layer_ids: tuple[int, ...] = attrs.field(default=(), validator=deep_iterable(ge(1)))
    ple_embed_dim: int = attrs.field(validator=SIZE)
    ple_conv_kernel_size: int = attrs.field(default=4, validator=[ge(2), le(64)])
    ngram_size: int = attrs.field(default=3, validator=[ge(2), le(16)])
    heads_per_ngram: int = attrs.field(default=8, validator=[ge(1), le(64)])
    ngram_vocab_size_base: int = attrs.field(default=20_000_000, validator=SIZE)
    make_ngram_vocab_size_divisible_by: int = attrs.field(default=128, validator=SIZE)
    seed: int = attrs.field(default=1234, validator=ge(0))
    split_ngram_parts: int = attrs.field(default=512, validator=[ge(1), le(1 << 16)])
    eos_token_id: int | None = None

    @ple_embed_dim.default
    def _like_the_hidden_states(self) -> int:
        return self.hidden_size

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.indexer_budget % self.indexer_compress_ratio:
            raise ValueError(
                f"indexer_budget is {self.indexer_budget}; it must be a multiple of indexer_compress_ratio, "
                f"{self.indexer_compress_ratio}"
            )
        layers = [layer for layer, each in enumerate(self.types, 1) if each == RECURRENT]
        if not {*self.ple_layer_ids} <= {*layers}:
            raise ValueError(f"ple_layer_ids is {self.ple_layer_ids}; it may have the recurrent layers, {layers}")
        if self.ple_layer_ids and self.ple_embed_dim % self.ngram_tables:
            raise ValueError(
                f"ple_embed_dim, {self.ple_embed_dim}, is no multiple of the {self.ngram_tables} tables that "
                "ngram_size and heads_per_ngram give"
            )
        if self.ple_layer_ids and not 0 <= (-1 if self.eos_token_id is None else self.eos_token_id) < self.vocab_size:
            raise ValueError(f"eos_token_id is {self.eos_token_id}; n-grams end at a token of the vocabulary")

    @property
    def ngram_tables(self) -> int:
        """The number of tables of n-grams of a layer."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without ``partial_rotary_factor``, whole heads are rotated."""
        given = {key: value for key, value in config.items() if value is not None and key != "number_of_conv_states"}
        if isinstance(types := given.get("layer_types"), list | tuple):
            given["layer_types"] = [FULL if each == INDEXED else each for each in types]
        if isinstance(layers := given.get("ple_layer_ids"), list | tuple) and all(type(each) is int for each in layers):
            given["ple_layer_ids"] = sorted({*layers})
        if isinstance(ends := given.get("eos_token_id"), list | tuple):
            given["eos_token_id"] = ends[0] if ends else None
        return super().from_config(cls.with_defaults(given, partial_rotary_factor=1.0), layer_type)
