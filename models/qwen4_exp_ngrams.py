"""Qwen3.8-Flash-Next's embeddings of n-grams, which some layers add to the residual streams.

Source: Qwen Team, the published code of Qwen3.8-Flash-Next, 2026.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import Cut, Embedding, LayerState, MergedLinear, ShortConvolution, StreamNorm, Weight
from hal.step import SEQUENCE, SlotBatch, State

from .qwen4_exp_config import Qwen4ExpConfig

MASK = (1 << 64) - 1
GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64: Steele et al., *Fast Splittable Pseudorandom Number Generators*, 2014."""
BETWEEN_LAYERS = 10007
LEAST = 1e-6
"""The least magnitude of a score whose root is taken."""


def split_mix(value: int) -> int:
    """Return the number that SplitMix64 gives for a state."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def multipliers(config: Qwen4ExpConfig, place: int) -> list[int]:
    """Return the multipliers of the tokens of an n-gram, odd and less than 2^63 divided by the vocabulary.

    Args:
        config: the sizes.
        place: the number of layers with n-grams before this one.
    """
    bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + BETWEEN_LAYERS * place
    states = [(seed + GAMMA * (token + 1)) & MASK for token in range(config.ngram_size)]
    return [2 * (split_mix(state) % bound) + 1 for state in states]


def table_sizes(config: Qwen4ExpConfig, place: int) -> list[int]:
    """Return the rows of each table of a layer: prime numbers, all of which differ between tables and layers."""
    primes = (
        number
        for number in count(max(config.ngram_vocab_size_base, 2))
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
    )
    tables = config.ngram_tables
    return [*islice(primes, place * tables, (place + 1) * tables)]


class NgramEmbedding(nn.Module):
    """Looks up the n-grams that end with each token, one row of each table.

    The tables are one embedding, whose rows ranks share. The checkpoint's numbers of the hashes are not read: they
    follow from the configuration.

    Args:
        config: the sizes.
        place: the number of layers with n-grams before this one.
    """

    multipliers: Tensor
    table_sizes: Tensor
    first_rows: Tensor

    def __init__(self, config: Qwen4ExpConfig, place: int) -> None:
        super().__init__()
        self.end = config.eos_token_id or 0
        sizes = table_sizes(config, place)
        firsts = [sum(sizes[:table]) for table in range(len(sizes))]
        self.constants = {"multipliers": multipliers(config, place), "table_sizes": sizes, "first_rows": firsts}
        padding = config.make_ngram_vocab_size_divisible_by
        rows = -(-sum(sizes) // padding) * padding
        self.ngram_embedding = PartedEmbedding(rows, config.ple_embed_dim // len(sizes), config.split_ngram_parts)
        for name, values in self.constants.items():
            self.register_buffer(name, torch.empty(len(values), dtype=torch.int64))
        self.states = {"tokens": State(SEQUENCE, (config.ngram_size - 1,), torch.int64, saved=True)}

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its numbers, which are constant."""
        axes = {"multipliers": "longest", "table_sizes": "tables", "first_rows": "tables"}
        return {name: Weight((), axes[name], values=tuple(each)) for name, each in self.constants.items()}

    def forward(self, batch: SlotBatch, state: LayerState) -> Tensor:
        """Return the embeddings of a step's tokens, ``[tokens, ple_embed_dim]``."""
        hashes = self.multipliers, self.table_sizes, self.first_rows
        lengths = batch.query_start_loc, batch.kv_lens
        rows = ops.hash_ngrams(batch.token_ids, state["tokens"], *hashes, *batch.state_slots, *lengths, self.end)
        return self.ngram_embedding(rows.flatten()).view(rows.shape[0], -1)

    if TYPE_CHECKING:
        __call__ = forward


class PartedEmbedding(Embedding):
    """An embedding whose rows several tensors of the checkpoint have, ``shard_0.weight`` and so on."""

    def __init__(self, rows: int, width: int, parts: int) -> None:
        super().__init__(rows, width)
        self.part = -(-rows // parts)

    @property
    def weights(self) -> Mapping[str, Weight]:
        starts = range(0, self.vocab_size, self.part)
        sizes = [min(self.part, self.vocab_size - start) for start in starts]
        rows = Cut("vocab_size", (self.vocab_size,), tuple((0, size, size) for size in sizes))
        names, whole = tuple(f"shard_{number}.weight" for number in range(len(sizes))), super().weights["weight"]
        return {"weight": Weight(names, whole.axes, whole.shard, rows, share=whole.share)}


class NgramLayer(nn.Module):
    """What the embeddings of n-grams add to the residual streams: gated values, and a convolution of these.

    A stream's gate is the sigmoid of a signed root: of the product of its norm with that of a key. Ranks have it whole,
    except the tables.

    Args:
        config: the sizes.
        place: the number of layers with n-grams before this one.
    """

    def __init__(self, config: Qwen4ExpConfig, place: int) -> None:
        super().__init__()
        self.count, self.hidden_size = config.hc_count, config.hidden_size
        features, reach = self.count * self.hidden_size, config.ngram_size
        self.ple_embedding = NgramEmbedding(config, place)
        parts = {"key_proj": features, "value_proj": self.hidden_size}
        self.key_value_proj = MergedLinear(config.ple_embed_dim, parts, shard=None)
        norm = self.hidden_size, self.count, config.rms_norm_eps
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(*norm) for _ in range(3))
        width = config.ple_conv_kernel_size
        self.conv1d = ShortConvolution([features], width, dilation=reach, shard=False)
        self.states = {
            **self.ple_embedding.states,
            "values": State(SEQUENCE, ((width - 1) * reach, features), saved=True),
        }

    def forward(self, streams: Tensor, batch: SlotBatch, state: LayerState) -> Tensor:
        """Map the streams ``[tokens, count, hidden_size]`` to the same shape."""
        key, value = self.key_value_proj(self.ple_embedding(batch, state)).split(self.key_value_proj.sizes, dim=-1)
        score: Tensor = (self.norm_key(key.view_as(streams)) * self.norm_query(streams)).sum(-1, keepdim=True)
        score = score / math.sqrt(self.hidden_size)
        gate = (score.abs().clamp(min=LEAST).sqrt() * score.sign()).sigmoid()
        gated: Tensor = gate * value.unsqueeze(1)
        near = self.conv1d(self.norm_conv(gated).flatten(1), batch, state["values"])
        return streams + (gated + near.view_as(streams))

    if TYPE_CHECKING:
        __call__ = forward
