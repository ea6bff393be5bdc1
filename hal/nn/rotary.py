"""Cos and sin of the rotary position embedding, built once per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from hal.config import read


@attrs.frozen
class RopeParameters:
    """The ``rope_parameters`` of a checkpoint's config.json.

    Attributes:
        rope_theta: the base of the frequencies.
        rope_type: how positions are scaled; ``default`` does not.
    """

    rope_theta: float = 10000.0
    rope_type: Literal["default"] = "default"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeParameters:
        """Read a config.json of either spelling: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``."""
        parameters = config.get("rope_parameters")
        if parameters is None:
            parameters = config.get("rope_scaling") or {}
            if not isinstance(parameters, Mapping):
                return read(cls, parameters, "rope_scaling")  # which says what is wrong with it
            parameters = {**parameters}
            if "rope_theta" in config:
                parameters["rope_theta"] = config["rope_theta"]
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
