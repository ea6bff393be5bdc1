"""The keys of config.json that decoders share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal, Self

import attrs
from attrs.validators import ge, le

from hal.config import read_model_config
from hal.errors import ConfigError
from hal.nn.mlp import ActivationName
from hal.nn.rope_parameters import KEYS_BESIDE, SIZE, RopeParameters

FULL: Final[Literal["full_attention"]] = "full_attention"
SLIDING: Final[Literal["sliding_attention"]] = "sliding_attention"
LayerType = Literal["full_attention", "sliding_attention"]
"""The entries of ``layer_types`` in config.json."""


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The keys of config.json that affect the computation, under the same names. Families add keys.

    ``num_key_value_heads`` defaults to ``num_attention_heads``, and ``head_dim`` to ``hidden_size`` divided by it.

    Attributes:
        partial_rotary: whether the family rotates the part ``partial_rotary_factor`` of each head; other families
            refuse the key, which transformers ignores for them.
    """

    partial_rotary: ClassVar[bool] = False
    vocab_size: int = attrs.field(validator=SIZE)
    hidden_size: int = attrs.field(validator=SIZE)
    intermediate_size: int = attrs.field(validator=SIZE)
    num_hidden_layers: int = attrs.field(validator=SIZE)
    num_attention_heads: int = attrs.field(validator=SIZE)
    num_key_value_heads: int = attrs.field(validator=SIZE)
    head_dim: int = attrs.field()
    max_position_embeddings: int = attrs.field(validator=SIZE)
    rms_norm_eps: float = attrs.field(default=1e-6, validator=[ge(0.0), le(1.0)])
    hidden_act: ActivationName = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    rope: RopeParameters = attrs.field(factory=RopeParameters)

    least_head_dim: ClassVar[int] = 2

    @num_key_value_heads.default
    def _as_many_as_queries(self) -> int:
        return self.num_attention_heads

    @head_dim.default
    def _equal_parts(self) -> int:
        return self.hidden_size // max(self.num_attention_heads, 1)  # the validator rejects 0 later, by name

    def __attrs_post_init__(self) -> None:
        if not self.least_head_dim <= self.head_dim < 1 << 31 or self.head_dim % 2:
            limits = f"from {self.least_head_dim} to {(1 << 31) - 2}"
            raise ValueError(f"head_dim is {self.head_dim}; the rotary embedding needs an even number {limits}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads, {self.num_attention_heads}, "
                f"is not a multiple of num_key_value_heads, {self.num_key_value_heads}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json.

        Args:
            config: its content.
            layer_type: see :meth:`RopeParameters.from_config`.

        Raises:
            ConfigError: a key is missing, or the model does not support a value.
        """
        others = {key: value for key, value in config.items() if key not in KEYS_BESIDE}
        rope = RopeParameters.from_config(config, layer_type)
        if rope.partial_rotary_factor != 1.0 and not cls.partial_rotary:
            raise ConfigError(
                f"config.json has partial_rotary_factor {rope.partial_rotary_factor}, and this family rotates whole "
                "heads",
                "remove the key if transformers computes the model without it",
            )
        return attrs.evolve(read_model_config(cls, others), rope=rope)

    @staticmethod
    def with_defaults(config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
        """Return a config.json in which keys that are missing or null have the defaults of a family."""
        return {**config, **{key: value for key, value in defaults.items() if config.get(key) is None}}


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the vision tower, from the config.json of a model that reads images.

    Raises:
        ConfigError: there are none.
    """
    return dict(_table(config, "vision_config"))


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(found := config.get(name), Mapping):
        raise ConfigError(
            f"config.json has no table {name}, which {config.get('architectures')} needs",
            "add it, or name the architecture of the text model",
        )
    return found


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the text model, from the config.json of a model that also reads images.

    Raises:
        ConfigError: there are none.
    """
    text = _table(config, "text_config")
    tied = config.get("tie_word_embeddings")
    return dict(text) if tied is None else {**text, "tie_word_embeddings": tied}


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


def check_layer_types(config: Any, attribute: Any, value: tuple[str, ...] | None) -> None:
    """Validate a config's ``layer_types``, as an attrs validator: one for each layer, or None.

    Raises:
        ValueError: there is another number of them than layers.
    """
    if value is not None and len(value) != config.num_hidden_layers:
        raise ValueError(f"{attribute.name} has {len(value)} entries for {config.num_hidden_layers} layers")


@attrs.frozen(kw_only=True)
class AlternatingConfig(DecoderConfig):
    """The decoder's keys, and those of families in which layers with a window and full ones alternate, as in Gemma."""

    sliding_window: int | None = attrs.field(default=4096, validator=check_window)
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)

    def types(self, full_every: int) -> tuple[LayerType, ...]:
        """Return the type of each layer: ``layer_types``, or without it, each ``full_every``-th is full."""
        layers = range(1, self.num_hidden_layers + 1)
        return self.layer_types or tuple(SLIDING if layer % full_every else FULL for layer in layers)

    @property
    def windows(self) -> Mapping[LayerType, int | None]:
        """The window of each type of layer."""
        return {FULL: None, SLIDING: self.sliding_window}


@attrs.frozen(kw_only=True)
class WindowConfig(DecoderConfig):
    """The decoder's keys, and those that select the layers with a sliding window, as in Qwen.

    ``layer_types`` selects them explicitly. Without it, :meth:`slides` does.
    """

    use_sliding_window: bool = False
    sliding_window: int | None = attrs.field(default=4096, validator=check_window)
    max_window_layers: int = 28
    layer_types: tuple[LayerType, ...] | None = attrs.field(default=None, validator=check_layer_types)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layer_type: str | None = None) -> Self:
        """Read a checkpoint's config.json. Version 5 of transformers writes 0 for a window that is not used."""
        unused = config.get("sliding_window") == 0 and not config.get("use_sliding_window")
        given = {key: each for key, each in config.items() if not unused or key != "sliding_window"}
        return super().from_config(given, layer_type)

    def slides(self, layer: int) -> bool:
        """Return whether a layer has a window if all may: those from ``max_window_layers`` on."""
        return layer >= self.max_window_layers

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer, or None."""
        if not self.use_sliding_window:
            return None
        slides = self.slides(layer) if self.layer_types is None else self.layer_types[layer] == SLIDING
        return self.sliding_window if slides else None
