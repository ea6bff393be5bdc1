"""The keys of DeepSeek-V4's config.json, in the published spelling and in that of version 5 of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

import attrs
from attrs.validators import ge, le

from hal.nn import SLIDING, DecoderConfig, RopeParameters, check_layer_types
from hal.nn.rope_parameters import SIZE
from hal.ops import HyperConnectionOptions

SPARSE: Final[Literal["compressed_sparse_attention"]] = "compressed_sparse_attention"
HEAVY: Final[Literal["heavily_compressed_attention"]] = "heavily_compressed_attention"
LayerKind = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
KINDS: Mapping[int, LayerKind] = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""The types of layers by the tokens of an entry in the published models; 0 for layers without entries."""
MAIN, COMPRESS = "main", "compress"
"""The tables of rope parameters: of layers without entries, and of the others."""
EPS = [ge(0.0), le(1.0)]


@attrs.frozen(kw_only=True)
class DeepseekV4Config(DecoderConfig):
    """The keys of attention with compressed entries, of experts, and of residual streams.

    Attributes:
        layer_types: whether a layer attends to a window alone, beside it to entries that an index selects, or to all.
        compress_ratios: the tokens of an entry of each layer, if there are no ``layer_types``.
        num_hash_layers: the number of first layers with a table, if there are no ``mlp_layer_types``.
        compress_rates: the tokens of an entry, by the type of a layer.
        sliding_window: the window of all layers.
        index_topk: the number of selected entries.
        o_groups: the groups of heads that are projected apart to ``o_lora_rank`` features each.
        mlp_layer_types: whether a layer's experts are those of a table of tokens, or those with the highest scores.
        main_rope: the rope parameters of layers without entries; ``rope`` has those of the others.
    """

    partial_rotary = True
    num_key_value_heads: Literal[1] = 1
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    head_dim: int = 512
    qk_rope_head_dim: int = attrs.field(validator=SIZE)
    layer_types: tuple[LayerKind, ...] = attrs.field(validator=check_layer_types)
    compress_ratios: tuple[int, ...] | None = attrs.field(default=None, eq=False)
    num_hash_layers: int = attrs.field(default=3, validator=ge(0), eq=False)
    compress_rates: dict[str, int] = attrs.field(factory=dict)
    sliding_window: int = attrs.field(default=128, validator=SIZE)
    q_lora_rank: int = attrs.field(default=1024, validator=SIZE)
    o_groups: int = attrs.field(default=8, validator=SIZE)
    o_lora_rank: int = attrs.field(default=1024, validator=SIZE)
    index_n_heads: int = attrs.field(default=64, validator=SIZE)
    index_head_dim: int = attrs.field(default=128, validator=SIZE)
    index_topk: int = attrs.field(default=512, validator=SIZE)
    hc_mult: int = attrs.field(default=4, validator=[ge(1), le(64)])
    hc_sinkhorn_iters: int = attrs.field(default=20, validator=[ge(1), le(1000)])
    hc_eps: float = attrs.field(default=1e-6, validator=EPS)
    mlp_layer_types: tuple[Literal["hash_moe", "moe"], ...] = attrs.field(validator=check_layer_types)
    moe_intermediate_size: int = attrs.field(default=2048, validator=SIZE)
    n_routed_experts: int = attrs.field(default=256, validator=ge(1))
    n_shared_experts: Literal[1] = 1
    num_experts_per_tok: int = 6
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    norm_topk_prob: Literal[True] = True
    routed_scaling_factor: float = attrs.field(default=1.5, validator=[ge(2.0**-16), le(2.0**16)])
    swiglu_limit: float = attrs.field(default=10.0, validator=[ge(2.0**-16), le(2.0**16)])
    expert_dtype: Literal["fp8", "bf16"] | None = None  # The published checkpoints have fp4, which hal does not read.
    num_nextn_predict_layers: int = 1
    main_rope: RopeParameters = attrs.field(factory=RopeParameters)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"o_groups, {self.o_groups}, does not divide num_attention_heads")
        if missing := [each for each in self.layer_types if self.group(each) < 1 and each != SLIDING]:
            raise ValueError(f"compress_rates has no number of tokens, 1 or more, for {missing[0]}")
        for name in ("head_dim", "index_head_dim"):
            if (size := getattr(self, name)) < self.qk_rope_head_dim:
                raise ValueError(f"{name}, {size}, is less than qk_rope_head_dim, {self.qk_rope_head_dim}")

    def group(self, layer_type: str) -> int:
        """Return the tokens of an entry in layers of a type; 0 for no entries."""
        return self.compress_rates.get(layer_type, 0)

    @property
    def connection(self) -> HyperConnectionOptions:
        """The options of the residual streams."""
        return HyperConnectionOptions(self.rms_norm_eps, self.hc_eps, self.hc_sinkhorn_iters)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Without types of layers, they are those of the published models."""
        given = {key: value for key, value in config.items() if value is not None}
        count, head_dim = _number(given, "num_hidden_layers", 0), _number(given, "head_dim", 512)
        ratios, hashed = given.get("compress_ratios"), _number(given, "num_hash_layers", 3)
        kinds: list[Any] = [HEAVY, HEAVY, *[HEAVY, SPARSE] * count]
        if isinstance(ratios, list | tuple):
            kinds = [KINDS.get(each) if type(each) is int else each for each in ratios]
        rotated = given.get("qk_rope_head_dim")
        fits = type(rotated) is int and 1 <= rotated <= head_dim
        if rotated is None or (fits and "partial_rotary_factor" in given):
            given.pop("qk_rope_head_dim", None)
        given = cls.with_defaults(
            given,
            intermediate_size=given.get("moe_intermediate_size", 2048),
            layer_types=kinds[:count],
            mlp_layer_types=(["hash_moe"] * hashed + ["moe"] * count)[:count],
            compress_rates={SPARSE: given.pop("compress_rate_csa", 4), HEAVY: given.pop("compress_rate_hca", 128)},
            partial_rotary_factor=rotated / head_dim if rotated is not None and fits else 64 / 512,
        )
        table, scaling = given.get("rope_parameters"), given.pop("rope_scaling", None)
        given["rope_parameters"] = _ropes(given, table or scaling or {})
        if table and scaling and table != scaling:
            given["rope_scaling"] = scaling  # which RopeParameters refuses, like a table that is none
        given.pop("compress_rope_theta", None)
        rope, main = (RopeParameters.from_config(given, each) for each in (COMPRESS, MAIN))
        given.setdefault("qk_rope_head_dim", max(rope.width(head_dim), 1))
        return attrs.evolve(super().from_config(given, COMPRESS), main_rope=main)


def _number(given: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of config.json; 0 for one that is none or too large, which the validators refuse."""
    found = given.get(key, default)
    return found if type(found) is int and 0 <= found < 1 << 16 else 0


def _ropes(given: Mapping[str, Any], flat: Any) -> Any:
    """Return both tables of rope parameters. The published config.json has the scaling of one, and both bases."""
    if not isinstance(flat, Mapping):
        return flat
    if MAIN in flat and COMPRESS in flat:
        return {key: flat[key] for key in (MAIN, COMPRESS)}
    compress = {**flat, "rope_theta": given.get("compress_rope_theta", 160000.0)}
    if "yarn" in (flat.get("type"), flat.get("rope_type")):
        compress.setdefault("attention_factor", 1.0)
    return {MAIN: {"rope_theta": given.get("rope_theta", 10000.0)}, COMPRESS: compress}
