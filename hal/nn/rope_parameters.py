"""The parameters of rotary position embeddings in config.json, and the scaling methods for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from attrs.validators import deep_iterable, ge, gt, le, lt, optional
from torch import Tensor

from hal.config import read
from hal.errors import ConfigError, nearest

SIZE = [ge(1), lt(1 << 31)]
"""attrs validators of a size or a number of tokens, which are int32 on devices."""
LARGEST_SCALE = 255.0
"""The maximum factor of cos and sin. Attention scores grow by its square, which float16 can represent."""
_MOST = 2.0**64
# Products and quotients of such numbers and positions are finite in float32, the dtype of the angles.
_POSITIVE = [gt(0.0), ge(1 / _MOST), le(_MOST)]
_NOT_NEGATIVE = optional([ge(0.0), le(_MOST)])

ORIGINAL = "original_max_position_embeddings"
KEYS_BESIDE = frozenset({ORIGINAL, "partial_rotary_factor"})
"""Keys of config.json beside the table of rope parameters that :class:`RopeParameters` reads, and few models have."""
INERT_KEYS = frozenset({ORIGINAL, "finetuned", "mrope_section", "mrope_interleaved"})
"""Keys without effect on texts, in which all rows of positions are equal, if the ``rope_type`` does not read them."""
NEUTRAL_KEYS = frozenset({"factor", "attention_factor", "attn_factor", "extrapolation_factor"})
"""Factors without effect if they are 1 and the ``rope_type`` does not read them."""
_REFUSED = {
    "attn_factor": (
        "which vLLM multiplies the attention factor by, and transformers ignores",
        "remove it, or replace it by attention_factor, the factor of cos and sin",
    ),
}
"""Why a factor other than 1 is refused, and the remedy, where an unknown key's error would mislead."""


@attrs.frozen(kw_only=True)
class RopeParameters:
    """The ``rope_parameters`` of config.json; this class is the ``rope_type`` ``default``, without scaling.

    Attributes:
        rope_theta: the base of the frequencies; more than 1, so that they decrease from pair to pair.
        partial_rotary_factor: the part of a head's elements that is rotated, from the first on.

    Source: Su et al., *RoFormer: Enhanced Transformer with Rotary Position Embedding*, 2021.
    """

    rope_theta: float = attrs.field(default=10000.0, validator=[gt(1.0), le(_MOST)])
    partial_rotary_factor: float = attrs.field(default=1.0, validator=[gt(0.0), le(1.0)])

    @staticmethod
    def from_config(config: Mapping[str, Any], layer_type: str | None = None) -> RopeParameters:
        """Read a config.json with ``rope_parameters``, or with the older ``rope_theta`` and ``rope_scaling``.

        Args:
            config: the content of config.json.
            layer_type: the key of the table to read, where ``rope_parameters`` has one for each entry of
                ``layer_types``.

        Returns:
            An instance of the subclass for the ``rope_type``, which older files call
            ``type``. Null values mean the default. ``INERT_KEYS`` and ``NEUTRAL_KEYS`` say which keys have no
            effect.

        Raises:
            ConfigError: both spellings are present and differ, the ``rope_type`` is unknown, or a key is unknown,
                missing or out of range.
        """
        tables = {key: config.get(key) for key in ("rope_parameters", "rope_scaling")}
        new = tables["rope_parameters"]
        if layer_type is not None and isinstance(new, Mapping) and layer_type in new:
            tables["rope_parameters"] = new[layer_type]
        given = [_read(table, config, key) for key, table in tables.items() if table not in (None, {})]
        if given and given[0] != given[-1]:
            raise ConfigError(
                "config.json has rope_parameters and a rope_scaling that differs", "remove one of them from config.json"
            )
        return given[0] if given else _read({}, config, "rope_scaling")

    def inv_freq(self, head_dim: int, device: torch.device) -> Tensor:
        """Return the angle per position of each pair of a head's elements, in radians: ``[head_dim / 2]``, float32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
        return 1.0 / self.rope_theta**exponent

    @property
    def attention_scaling(self) -> float:
        """The factor of cos and sin; attention scores grow by its square."""
        return 1.0

    @property
    def score_scaling(self) -> float:
        """A further factor of attention scores, which latent attention applies to both parts of a head."""
        return 1.0

    @property
    def divisors(self) -> tuple[float, ...]:
        """What divides the angle per position of each pair, beside :meth:`inv_freq`; empty for nothing."""
        return ()

    def longest(self, max_position_embeddings: int) -> int:
        """Return the maximum sequence length, in tokens, of a config.json with this ``max_position_embeddings``."""
        return max_position_embeddings

    def width(self, head_dim: int) -> int:
        """Return the number of rotated elements of a head."""
        return int(head_dim * self.partial_rotary_factor)


def _scaled(length: int, factor: float) -> int:
    """Return a scaled length in tokens. Positions are int32 on devices."""
    return min(int(length * factor), (1 << 31) - 1)


@attrs.frozen(kw_only=True)
class LinearRope(RopeParameters):
    """``rope_type`` ``linear``: divides positions by ``factor``.

    Source: Chen et al., *Extending Context Window of Large Language Models via Positional Interpolation*, 2023.
    """

    factor: float = attrs.field(validator=_POSITIVE)

    def longest(self, max_position_embeddings: int) -> int:
        return _scaled(max_position_embeddings, self.factor)  # config.json has the length before scaling.

    def inv_freq(self, head_dim: int, device: torch.device) -> Tensor:
        return super().inv_freq(head_dim, device) / self.factor


@attrs.frozen(kw_only=True)
class ProportionalRope(RopeParameters):
    """``rope_type`` ``proportional``: the part ``partial_rotary_factor`` of a head's pairs turns, the others stay.

    The pairs are those of a whole head, and so are their frequencies. ``factor`` divides positions.

    Source: Gemma Team, the published code of *Gemma 4*, 2026.
    """

    factor: float = attrs.field(default=1.0, validator=_POSITIVE)

    def inv_freq(self, head_dim: int, device: torch.device) -> Tensor:
        turning = int(self.partial_rotary_factor * head_dim // 2)
        plain = super().inv_freq(head_dim, device) / self.factor
        return torch.where(torch.arange(head_dim // 2, device=device) < turning, plain, 0.0)

    def width(self, head_dim: int) -> int:
        return head_dim


@attrs.frozen(kw_only=True)
class Llama3Rope(RopeParameters):
    """``rope_type`` ``llama3``: divides only low frequencies.

    Attributes:
        factor: the divisor of low frequencies.
        low_freq_factor: pairs with fewer turns over the original length are divided by ``factor``.
        high_freq_factor: pairs with more turns are unchanged; between the two, linear interpolation applies.
        original_max_position_embeddings: the context length of the original training, in tokens.

    Source: Grattafiori et al., *The Llama 3 Herd of Models*, 2024, and the code of Llama 3.1.
    """

    factor: float = attrs.field(validator=_POSITIVE)
    low_freq_factor: float = attrs.field(validator=_POSITIVE)
    high_freq_factor: float = attrs.field(validator=_POSITIVE)
    original_max_position_embeddings: int = attrs.field(validator=SIZE)

    @high_freq_factor.validator
    def _above_low(self, attribute: Any, value: float) -> None:
        if value <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {value}; it must be greater than low_freq_factor, {self.low_freq_factor}"
            )

    def inv_freq(self, head_dim: int, device: torch.device) -> Tensor:
        plain = super().inv_freq(head_dim, device)
        turns = plain * (self.original_max_position_embeddings / (2 * math.pi))
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(plain / self.factor, plain, kept.clamp(0.0, 1.0))


@attrs.frozen(kw_only=True)
class YarnRope(RopeParameters):
    """``rope_type`` ``yarn``: divides low frequencies, keeps high ones, and scales attention.

    Attributes:
        factor: the divisor of low frequencies.
        original_max_position_embeddings: the context length of the original training, in tokens.
        attention_factor: the factor of cos and sin; None (``null``) computes it from ``factor``.
        beta_fast: pairs with more turns over the original length are unchanged.
        beta_slow: pairs with fewer turns are divided by ``factor``; between the two, linear interpolation by pair
            applies.
        truncate: whether the ends of the interpolation are rounded outwards to whole pairs.
        mscale: with ``mscale_all_dim``, makes the attention factor the quotient of both scalings; 0 is the same as
            None.
        mscale_all_dim: see ``mscale``.

    Source: Peng et al., *YaRN: Efficient Context Window Extension of Large Language Models*, 2023; ``mscale`` is
    DeepSeek's.
    """

    factor: float = attrs.field(validator=_POSITIVE)
    original_max_position_embeddings: int = attrs.field(validator=SIZE)
    attention_factor: float | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    beta_fast: float = attrs.field(default=32.0, validator=_POSITIVE)
    beta_slow: float = attrs.field(default=1.0, validator=_POSITIVE)
    truncate: bool = True
    mscale: float | None = attrs.field(default=None, validator=_NOT_NEGATIVE)
    mscale_all_dim: float | None = attrs.field(default=None, validator=_NOT_NEGATIVE)

    def __attrs_post_init__(self) -> None:
        if (largest := max(self.attention_scaling, self.score_scaling)) > LARGEST_SCALE:
            raise ValueError(
                f"attention_factor, or its value from factor, mscale and mscale_all_dim, is {largest:g}; it must be at "
                f"most {LARGEST_SCALE:g}"
            )

    def inv_freq(self, head_dim: int, device: torch.device) -> Tensor:
        plain = super().inv_freq(head_dim, device)
        first, last = self._pair_turning(self.beta_fast, head_dim), self._pair_turning(self.beta_slow, head_dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The bound is the number of elements, not of pairs, as in the published code that models were trained with.
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first or 0.001
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        return torch.lerp(plain, plain / self.factor, ((pairs - first) / width).clamp(0.0, 1.0))

    def longest(self, max_position_embeddings: int) -> int:
        # The documented way to enable YaRN adds these keys, and leaves max_position_embeddings as it was.
        return max(max_position_embeddings, _scaled(self.original_max_position_embeddings, self.factor))

    def _pair_turning(self, turns: float, head_dim: int) -> float:
        """Return the index, perhaps fractional or out of range, of the pair with ``turns`` over the original length."""
        per_turn = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(per_turn) / (2 * math.log(self.rope_theta))

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpened(self.mscale) / self._sharpened(self.mscale_all_dim)
        return self._sharpened(1.0)

    @property
    def score_scaling(self) -> float:
        return self._sharpened(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _sharpened(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@attrs.frozen(kw_only=True)
class LongRope(RopeParameters):
    """``rope_type`` ``longrope``: divides the angles of each pair by a number of its own.

    Attributes:
        short_factor: the divisors of a model that is no longer than in the original training.
        long_factor: the divisors of a longer model, for texts of all lengths. transformers applies ``short_factor`` to
            its short texts; but keys in a cache keep their divisors when the text grows.
        original_max_position_embeddings: the context length of the original training, in tokens.
        max_position_embeddings: the model's, from config.json.
        factor: the ratio of both lengths; None to compute it.
        attention_factor: the factor of cos and sin; None to compute it from ``factor``.

    Source: Ding et al., *LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens*, 2024, and the code of Phi-3.
    """

    short_factor: tuple[float, ...] = attrs.field(validator=deep_iterable(_POSITIVE))
    long_factor: tuple[float, ...] = attrs.field(validator=deep_iterable(_POSITIVE))
    original_max_position_embeddings: int = attrs.field(validator=[*SIZE, ge(2)])
    max_position_embeddings: int = attrs.field(validator=SIZE)
    factor: float | None = attrs.field(default=None, validator=optional(_POSITIVE))
    attention_factor: float | None = attrs.field(default=None, validator=[_NOT_NEGATIVE, optional(le(LARGEST_SCALE))])

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        factor = self.max_position_embeddings / original if self.factor is None else self.factor
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    @property
    def divisors(self) -> tuple[float, ...]:
        longer = self.max_position_embeddings > self.original_max_position_embeddings
        return self.long_factor if longer else self.short_factor


ROPE_TYPES: Mapping[str, type[RopeParameters]] = {
    "default": RopeParameters,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "proportional": ProportionalRope,
}
"""Classes by the ``rope_type`` in config.json."""


def _read(given: Any, config: Mapping[str, Any], where: str) -> RopeParameters:
    """Read one of the tables, with the keys of config.json beside it.

    Raises:
        ConfigError: as in :meth:`RopeParameters.from_config`.
    """
    if not isinstance(given, Mapping):
        return read(RopeParameters, given, where)  # raises the error
    parameters = {key: value for key, value in given.items() if value is not None}
    older = parameters.pop("type", None)
    rope_type = parameters.pop("rope_type", "default" if older is None else older)
    if older not in (None, rope_type):
        raise ConfigError(
            f"{where} has rope_type {rope_type!r} and type {older!r}, which differ",
            "remove one of them from config.json",
        )
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"config.json has rope_type {rope_type!r}: {nearest(str(rope_type), ROPE_TYPES)}",
            "use a checkpoint with one of these types, or without scaling",
        )
    known = {field.name for field in attrs.fields(ROPE_TYPES[rope_type])}
    for key in ("rope_theta", "partial_rotary_factor", "max_position_embeddings"):
        if key in known and config.get(key) is not None:
            parameters.setdefault(key, config[key])
    if config.get(ORIGINAL) is not None:  # As in transformers, the key beside the table has precedence.
        parameters[ORIGINAL] = config[ORIGINAL]
    for key in parameters.keys() - known:
        neutral = key in NEUTRAL_KEYS and type(parameters[key]) in (int, float) and parameters[key] == 1
        if neutral or key in INERT_KEYS:
            del parameters[key]
        elif key in _REFUSED:
            reason, remedy = _REFUSED[key]
            raise ConfigError(f"config.json has {key} {parameters[key]!r:.60}, {reason}", remedy)
    return read(ROPE_TYPES[rope_type], parameters, f"rope_parameters of rope_type {rope_type}")
