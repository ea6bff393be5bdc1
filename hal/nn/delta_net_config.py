"""The keys of config.json that models with gated delta networks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import attrs
from attrs.validators import ge, le

from hal.nn.decoder_config import FULL, DecoderConfig, check_layer_types
from hal.nn.rope_parameters import SIZE

RECURRENT: Final[Literal["linear_attention"]] = "linear_attention"
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
