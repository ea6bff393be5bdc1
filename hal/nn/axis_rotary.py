"""Rotary embeddings of positions along three axes: time, height and width (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.nn.rope_parameters import RopeParameters
from hal.nn.rotary import RotaryEmbedding
from hal.nn.weights.weight import Weight

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
