"""The keys of Gemma 4's config.json, and what each layer is by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs
from attrs.validators import ge, optional

from hal.nn import FULL, SLIDING, LayerType, RopeParameters, check_window

from .gemma2 import GemmaConfig


@attrs.frozen(kw_only=True)
class Gemma4Config(GemmaConfig):
    """Gemma's keys, and those of both types of layers, of embeddings for each layer, and of experts.

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

    @property
    def sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer reads: its own, or the last one of its type that has some."""
        first, last = self.num_hidden_layers - self.num_kv_shared_layers, dict[str, int]()
        for index, kind in enumerate(self.kinds[:first]):
            last[kind] = index
        return (*range(first), *(last[kind] for kind in self.kinds[first:]))

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
