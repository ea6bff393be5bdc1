"""Rotary position embeddings: cos and sin, computed once per step, of positions along one axis or three (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.errors import ConfigError
from hal.nn.rope_parameters import RopeParameters
from hal.nn.weights.weight import Weight


class RotaryEmbedding(nn.Module):
    """Cos and sin of the angles ``position * inv_freq[i]``, for the pair ``i`` of a head's elements.

    It has no table of positions, so the sequence length is unlimited.

    Args:
        head_dim: elements per head, of which ``parameters.partial_rotary_factor`` are rotated.
        parameters: the frequencies.
        interleaved: whether the elements of a pair are adjacent, rather than in both halves of the rotated ones.
        dtype: the dtype of cos and sin, such as float32, in which OLMo 2 rotates; None for the query's dtype.

    Attributes:
        width: the number of rotated elements.
        divisors: ``[width / 2]``: :attr:`RopeParameters.divisors`, float32; None for none.

    Raises:
        ConfigError: the rotated elements are no pairs, or the parameters are for another number of pairs.
    """

    def __init__(
        self,
        head_dim: int,
        parameters: RopeParameters,
        *,
        interleaved: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rope, self.interleaved, self.dtype = parameters, interleaved, dtype
        self.width = parameters.width(head_dim)
        if self.width < 2 or self.width % 2:
            raise ConfigError(
                f"partial_rotary_factor is {parameters.partial_rotary_factor}, so that {self.width} of the {head_dim} "
                "elements of a head are rotated",
                "use a factor for which the number is even, and 2 or more",
            )
        if (count := len(parameters.divisors)) not in (0, self.width // 2):
            raise ConfigError(
                f"the rope parameters have factors for {count} pairs, and a head has {self.width // 2} rotated pairs",
                "give short_factor and long_factor a number for each pair",
            )
        self.divisors: Tensor | None
        self.register_buffer("divisors", torch.empty(count, dtype=torch.float32) if count else None)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declaration of the divisors, which are constant."""
        return {"divisors": Weight((), "pairs", dtype=torch.float32, values=self.rope.divisors)}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each ``[tokens, width]``, computed in float32; those of a pair are equal.

        Args:
            positions: ``[tokens]``, int64; ``[3, tokens]`` for :class:`AxisRotaryEmbedding`.
            dtype: the dtype of the query to rotate.

        Returns:
            Tensors of the attribute ``dtype``, if it is set, else of the argument.
        """
        inv_freq = self.rope.inv_freq(self.width, positions.device)
        if self.divisors is not None:
            inv_freq = inv_freq / self.divisors
        angles = self.of_pairs(positions) * inv_freq
        angles = angles.repeat_interleave(2, dim=1) if self.interleaved else angles.repeat(1, 2)
        cos, sin = ops.pointwise(angles, "cos"), ops.pointwise(angles, "sin")
        if (scaling := self.rope.attention_scaling) != 1.0:
            cos, sin = cos * scaling, sin * scaling
        dtype = self.dtype or dtype
        return cos.to(dtype), sin.to(dtype)

    def of_pairs(self, positions: Tensor) -> Tensor:
        """Return the position by which each pair turns, float32, in a shape that broadcasts to ``[tokens, pairs]``."""
        return positions.float()[:, None]

    if TYPE_CHECKING:
        __call__ = forward


AXES = 3


@attrs.frozen
class AxisSections:
    """Which axis' position turns each pair of a head's elements.

    Attributes:
        sizes: the numbers of pairs that turn by time, height and width.
        interleaved: whether the axes alternate from pair to pair: height has the pairs 1, 4, ... and width the pairs 2,
            5, ..., each up to three times its number, and time the others. Else the axes follow each other.

    Source: Wang et al., *Qwen2-VL*, 2024; Qwen Team, *Qwen3-VL Technical Report*, 2025, for the interleaved order.
    """

    sizes: tuple[int, ...]
    interleaved: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], default: tuple[int, int, int], interleaved: bool) -> Self:
        """Read ``mrope_section`` of the rope parameters in config.json.

        Args:
            config: the content of config.json.
            default: the sizes of a config.json without the key.
            interleaved: the order of the family.

        Raises:
            ConfigError: the key is no list of three numbers, or ``mrope_interleaved`` contradicts the family.
        """
        tables = [each for key in ("rope_parameters", "rope_scaling") if isinstance(each := config.get(key), Mapping)]
        found = next((each["mrope_section"] for each in tables if each.get("mrope_section") is not None), default)
        if not (isinstance(found, list | tuple) and len(found) == AXES and all(type(each) is int for each in found)):
            raise ConfigError(f"mrope_section is {found!r:.70}", "give it three numbers of pairs")
        given = next((each["mrope_interleaved"] for each in tables if "mrope_interleaved" in each), interleaved)
        if given is not interleaved:
            raise ConfigError(
                f"mrope_interleaved is {given!r:.70}, and this family has {str(interleaved).lower()}",
                "remove the key if transformers computes the model without it",
            )
        return cls(tuple(found), interleaved)

    def axes(self, pairs: int) -> tuple[int, ...]:
        """Return the axis of each pair.

        Raises:
            ConfigError: the sections are not those of so many pairs.
        """
        if min(self.sizes) < 0 or sum(self.sizes) != pairs:
            raise ConfigError(
                f"mrope_section is {list(self.sizes)}, and a head has {pairs} rotated pairs",
                f"give it three numbers with the sum {pairs}",
            )
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(self.sizes) for _ in range(size))
        return tuple(pair % AXES if pair < AXES * self.sizes[pair % AXES] else 0 for pair in range(pairs))


class AxisRotaryEmbedding(RotaryEmbedding):
    """A rotary embedding in which each pair turns by the position along one of three axes.

    Args:
        head_dim: elements per head.
        parameters: the frequencies.
        sections: the axis of each pair.

    Attributes:
        axes: ``[width / 2]``, int64: the axis of each pair.
    """

    def __init__(self, head_dim: int, parameters: RopeParameters, sections: AxisSections) -> None:
        super().__init__(head_dim, parameters)
        self.sections = sections.axes(self.width // 2)
        self.register_buffer("axes", torch.empty(self.width // 2, dtype=torch.int64))
        self.axes: Tensor

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its constants."""
        return {**super().weights, "axes": Weight((), "pairs", dtype=torch.int64, values=self.sections)}

    def of_pairs(self, positions: Tensor) -> Tensor:
        return positions.index_select(0, self.axes).t().float()
