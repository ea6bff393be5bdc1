"""The keys of MiniMax-M3's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import attrs
from attrs.validators import ge, le

from hal.nn import FULL, check_layer_types
from hal.nn.rope_parameters import SIZE

from .minimax_m2 import RotaryDimConfig

SPARSE: Final[Literal["minimax_m3_sparse"]] = "minimax_m3_sparse"
TABLE = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""The keys of the table ``sparse_attention_config``, by those beside it of version 5 of transformers."""

FACTOR = [ge(2.0**-16), le(2.0**16)]


@attrs.frozen(kw_only=True)
class MiniMaxM3Config(RotaryDimConfig):
    """The keys of attention and experts, and those of the index, which has a head for each key head."""

    num_local_experts: int = attrs.field(default=128, validator=ge(1))
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = attrs.field(default=2.0, validator=FACTOR)
    dense_intermediate_size: int = attrs.field(default=12288, validator=SIZE)
    shared_intermediate_size: int = attrs.field(default=3072, validator=SIZE)
    swiglu_alpha: float = attrs.field(default=1.702, validator=FACTOR)
    swiglu_limit: float = attrs.field(default=7.0, validator=FACTOR)
    hidden_act: Literal["silu"] = "silu"
    index_n_heads: int = attrs.field(default=4, validator=SIZE)
    index_head_dim: int = attrs.field(default=128, validator=SIZE)
    index_block_size: int = attrs.field(default=128, validator=SIZE)
    index_topk_blocks: int = attrs.field(default=16, validator=SIZE)
    index_local_blocks: int = attrs.field(default=1, validator=ge(0))
    layer_types: tuple[Literal["full_attention", "minimax_m3_sparse"], ...] | None = attrs.field(
        default=None, validator=check_layer_types
    )
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = attrs.field(
        default=None, validator=check_layer_types
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        heads, local, top = self.num_key_value_heads, self.index_local_blocks, self.index_topk_blocks
        if self.index_n_heads != heads:
            raise ValueError(f"index_n_heads is {self.index_n_heads}; it must be num_key_value_heads, {heads}")
        if local > top:
            raise ValueError(f"index_local_blocks, {local}, exceeds index_topk_blocks, {top}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json."""
        given = dict(config)
        if given.get("hidden_act") == "swigluoai":  # which has an alpha and a limit, as ``silu`` here
            del given["hidden_act"]
        table: dict[str, Any] = dict(given.pop("sparse_attention_config", None) or {})
        if (kinds := table.pop("sparse_attention_freq", None)) is not None:
            table["layer_types"] = [SPARSE if each else FULL for each in kinds]
        if (kinds := given.pop("moe_layer_freq", None)) is not None:
            given = cls.with_defaults(given, mlp_layer_types=["sparse" if each else "dense" for each in kinds])
        return super().from_config({**given, **{TABLE.get(key) or key: value for key, value in table.items()}})
