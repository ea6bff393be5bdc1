"""Cos and sin of the rotary position embedding, built once per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from attrs.validators import gt, lt
from torch import Tensor, nn

from hal.config import read
from hal.errors import ConfigError


@attrs.frozen
class RopeParameters:
    """The ``rope_parameters`` of a checkpoint's config.json.

    Attributes:
        rope_theta: the base of the frequencies.
        rope_type: how positions are scaled; ``default`` does not.
    """

    rope_theta: float = attrs.field(default=10000.0, validator=[gt(0.0), lt(float("inf"))])
    rope_type: Literal["default"] = "default"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeParameters:
        """Read a config.json of either spelling: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

        Raises:
            ConfigError: both spellings are there and differ, or the scaling is not one that is known.
        """
        new, old = config.get("rope_parameters"), config.get("rope_scaling")
        if new and old and new != old:
            raise ConfigError("config.json has rope_parameters and another rope_scaling", "leave one of them out")
        parameters = new or old or {}
        if not isinstance(parameters, Mapping):
            return read(cls, parameters, "rope_parameters")  # which says what is wrong with it
        parameters = {**parameters}
        if config.get("rope_theta") is not None:
            parameters.setdefault("rope_theta", config["rope_theta"])
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters.pop("type"))
        return read(cls, parameters, "rope_parameters")


class RotaryEmbedding(nn.Module):
    """Angles of positions: ``position / theta ** (2 i / head_dim)`` for the pair ``i`` of a head's elements.

    It has no weights and no table, so that no length is the longest.
    """

    def __init__(self, head_dim: int, parameters: RopeParameters) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rope = parameters

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin, each ``[tokens, head_dim]`` of ``dtype``, computed in float32; the halves are equal.

        Args:
            positions: ``[tokens]``, int64.
            dtype: of the query that they will rotate.
        """
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=positions.device).float() / self.head_dim
        inverse = 1.0 / self.rope.rope_theta**exponent
        angles = (positions.float()[:, None] * inverse).repeat(1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)
