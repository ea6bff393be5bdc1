"""The keys of GLM-5.3-Flash's config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, Self

import attrs
from attrs.validators import ge, le, lt, optional

from hal.nn import FULL, RECURRENT, check_layer_types, limited_silu_and_mul
from hal.nn.rope_parameters import SIZE

from .glm_moe_dsa import GlmMoeDsaConfig
from .kimi_linear import UNREAD, WIDTH

LayerType = Literal["linear_attention", "indexed_attention", "full_attention"]
INDEXED: Final[Literal["indexed_attention"]] = "indexed_attention"
LOWER_BOUND: float | None = -5.0
TABLE = {
    "gate_lower_bound": "linear_lower_bound",
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""The keys of the table ``linear_attn_config``, by those beside it of version 5 of transformers."""


@attrs.frozen(kw_only=True)
class Glm5NextConfig(GlmMoeDsaConfig):
    """The keys of GLM-5.2, and those of recurrent layers, hyper-connections and pooled index keys.

    Attributes:
        index_kpool: the tokens of a group, which have one index key.
        linear_lower_bound: the least logarithm of a decay of a recurrent layer; None for no bound.
        swiglu_limit: the bound of gates and of the magnitudes that they scale.
        kda_layers: the recurrent layers, numbered from 1 on, which follow from ``layer_types``.
        full_attn_layers: likewise, the others.
        hc_mult: the number of residual streams.
        hc_eps: see :class:`hal.ops.HyperConnectionOptions`.
        hc_sinkhorn_iters: see there.
    """

    least_rotated = 0
    unread = ("head_dim",)
    index_kpool: int = attrs.field(default=16, validator=SIZE)
    index_kpool_always_select_tail: Literal[True] = True
    hidden_act: Literal["silu"] = "silu"
    swiglu_limit: float = attrs.field(default=10.0, validator=[ge(2.0**-16), le(2.0**16)])
    layer_types: tuple[LayerType, ...] | None = attrs.field(  # type: ignore[assignment]  # further types
        default=None, validator=check_layer_types
    )
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = attrs.field(
        default=None, validator=check_layer_types
    )
    linear_num_heads: int = attrs.field(default=64, validator=SIZE)
    linear_head_dim: int = attrs.field(default=128, validator=SIZE)
    linear_conv_kernel_dim: int = attrs.field(default=4, validator=WIDTH)
    linear_lower_bound: float | None = attrs.field(default=LOWER_BOUND, validator=optional(lt(0.0)))
    kda_layers: tuple[int, ...] | None = None
    full_attn_layers: tuple[int, ...] | None = None
    hc_mult: int = attrs.field(default=4, validator=[ge(1), le(64)])
    hc_eps: float = attrs.field(default=1e-6, validator=[ge(0.0), le(1.0)])
    hc_sinkhorn_iters: int = attrs.field(default=20, validator=[ge(1), le(1000)])

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.qk_rope_head_dim:
            raise ValueError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}; no part of a head is rotated, so it must be 0"
            )
        if self.index_topk % self.index_kpool:
            raise ValueError(
                f"index_topk is {self.index_topk}; it must be a multiple of index_kpool, {self.index_kpool}"
            )
        listed = {"kda_layers": (self.kda_layers, RECURRENT), "full_attn_layers": (self.full_attn_layers, INDEXED)}
        for key, (numbers, kind) in listed.items():
            wanted = [layer for layer, each in enumerate(self.types, 1) if each == kind]
            if numbers is not None and sorted(numbers) != wanted:
                raise ValueError(f"{key} is {numbers}; by the types of the layers, it must be {wanted}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json."""
        given = {key: value for key, value in config.items() if key not in UNREAD}
        given = cls.with_defaults(given, qk_rope_head_dim=0)
        table: dict[str, Any] = dict(given.pop("linear_attn_config", None) or {})
        bounded = table.pop("safe_gate", bool(table))
        given |= {TABLE.get(key) or key: value for key, value in table.items()}
        if bounded:
            given = cls.with_defaults(given, linear_lower_bound=LOWER_BOUND)
        return super().from_config(given)

    @property
    def types(self) -> Sequence[str]:
        """The type of each layer, recurrent or with an index."""
        given = self.layer_types or [INDEXED if each % 4 == 3 else RECURRENT for each in range(self.num_hidden_layers)]
        return [INDEXED if each == FULL else each for each in given]

    @property
    def attending(self) -> Sequence[int]:
        return [layer for layer, each in enumerate(self.types) if each == INDEXED]

    @property
    def latent_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def activation(self) -> Any:
        return partial(limited_silu_and_mul, limit=self.swiglu_limit)

    def dense(self, layer: int) -> bool:
        types = self.mlp_layer_types
        return super().dense(layer) if types is None else types[layer] == "dense"
