"""GLM-5.3-Flash, its text model: recurrent layers, and latent attention whose index has a key for each group of tokens.

| part | layers | where |
|---|---|---|
| residual | all: streams that hyper-connections mix, and their mean at the end | `hal.nn.HyperDecoderLayer` |
| mixer | three of four: Kimi delta attention, whose decays have a lower bound | `hal.nn.KimiDeltaAttention` |
| mixer | the others: latent attention without positions, to selected tokens | `PooledAttention` |
| MLP | the first ones: SwiGLU with a limit | `hal.nn.GatedMLP` |
| MLP | the others: experts by a sigmoid router with corrections, and a shared one | `hal.nn.SparseMLP` |

Source: Z.ai, the published code of GLM-5.3-Flash, 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.nn import (
    Angles,
    HyperConnection,
    HyperDecoderLayer,
    KimiDeltaAttention,
    LayerState,
    Linear,
    Mixer,
    StreamMean,
    text_config,
)
from hal.ops import HyperConnectionOptions
from hal.step import SEQUENCE, TOKEN, State

from .deepseek_v32 import DeepseekV32ForCausalLM, SelectiveAttention
from .glm5_next_config import INDEXED, Glm5NextConfig

GATE, BIAS = "index_kpool_compress_gate", "index_kpool_compress_ape"
"""The index's projection to the logits of a token's weight in its group, and what is added to them at each place."""

LANGUAGE = "model.language_model."
"""The prefix of the text model's tensors."""


class PooledAttention(SelectiveAttention):
    """Latent attention to the groups of tokens with the highest scores, and to those of the incomplete group."""

    def __init__(self, config: Glm5NextConfig, *, indexed: bool) -> None:
        super().__init__(config, None, indexed=indexed)
        self.group, width = config.index_kpool, config.index_head_dim
        selected = self.index_topk + self.group - 1
        self.states = {name: attrs.evolve(each, selected=selected) for name, each in self.states.items()}
        if indexed:
            self.indexer[GATE] = Linear(config.hidden_size, width)
            bias = nn.Parameter(torch.empty(self.group, width), requires_grad=False)
            self.indexer.register_parameter(BIAS, bias)
            index, tail = (
                State(TOKEN, (width,), group=self.group),
                State(SEQUENCE, (self.group, 2 * width), saved=True),
            )
            self.states = {**self.states, "index": index, "tail": tail}

    def select(
        self,
        hidden: Tensor,
        query: Tensor,
        index: Sequence[Tensor],
        angles: Angles,
        batch: Any,
        state: LayerState,
        shared: dict[str, Tensor],
    ) -> Tensor:
        if self.indexed:
            if "slots" not in shared:
                shared["slots"] = batch.group_slots(self.group)
            key, gate = self.indexer["k_norm"](index[0]), self.indexer[GATE](hidden)
            lengths = batch.query_start_loc, batch.kv_lens
            bias, (read, write) = self.indexer.get_parameter(BIAS), batch.state_slots
            pooled = ops.pool_groups(key, gate, bias, state["tail"], read, write, *lengths, self.group)
            ops.store_index_cache(pooled, state["index"], shared["slots"])
            query = self.indexer["wq_b"](query).unflatten(1, (self.index_heads, -1))
            keys = state["index"], batch.block_table, *lengths
            weights = self.indexer["weights_proj"](hidden)
            shared["selected"] = ops.select_keys(query, weights, *keys, self.index_topk, self.group)
        return shared["selected"]


class Glm5NextForConditionalGeneration(DeepseekV32ForCausalLM):
    """The text model of a checkpoint that can also read images."""

    other_names = MappingProxyType(
        {
            LANGUAGE: "model.",
            ".forget_gate.": ".",
            ".hc_attn_": ".attn_hc.",
            ".hc_ffn_": ".ffn_hc.",
            f".{GATE}": f".{GATE}.weight",
        }
    )
    ignored_prefixes = ("model.visual.", "visual.")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        glm = Glm5NextConfig.from_config(text_config(config) if "text_config" in config else config)
        mixing = HyperConnectionOptions(glm.rms_norm_eps, glm.hc_eps, glm.hc_sinkhorn_iters)
        connection = partial(HyperConnection, glm.hidden_size, glm.hc_mult, mixing)
        sizes = glm.hidden_size, glm.linear_num_heads, glm.linear_head_dim, glm.linear_conv_kernel_dim

        def layer(number: int) -> HyperDecoderLayer:
            mixer: Mixer
            if glm.types[number] == INDEXED:
                mixer = PooledAttention(glm, indexed=glm.indexed[number])
            else:
                bound = glm.linear_lower_bound
                mixer = KimiDeltaAttention(*sizes, glm.rms_norm_eps, lower_bound=bound, lone_heads=True)
            return HyperDecoderLayer(glm, mixer, glm.mlp(number), connection=connection)

        layers = map(layer, range(glm.num_hidden_layers))
        return cls(glm, layers, streams=StreamMean(glm.hc_mult), ignored_layers=glm.num_nextn_predict_layers)

    def ignores(self, name: str) -> bool:
        return super().ignores(name.replace(LANGUAGE, "model."))
