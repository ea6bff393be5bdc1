"""Where a checkpoint's tensors go in a model."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor, nn

from hal.nn import Linear, MergedLinear, QuantizedLinear
from hal.nn.linear import named_parts


@attrs.frozen
class Place:
    """Where a checkpoint's tensor goes: the rows of a parameter from ``start`` on; all of it, unless it is merged.

    The weight of a :class:`QuantizedLinear`, which is a buffer, counts as a parameter here.
    """

    module: nn.Module
    parameter: str
    start: int
    shape: tuple[int, ...]

    @property
    def quantized(self) -> bool:
        return isinstance(self.module, QuantizedLinear)

    @property
    def projects(self) -> bool:
        """Whether it is the weight of a projection, which a backend may bring into another form."""
        return isinstance(self.module, Linear | QuantizedLinear) and self.parameter == "weight"

    def dtype(self, computing: torch.dtype) -> torch.dtype:
        """What it is held in, in a model that computes in ``computing``."""
        return torch.int8 if self.quantized else computing

    def put(self, tensor: Tensor) -> Tensor:
        """Make ``tensor`` the parameter, or the buffer."""
        stored = tensor if self.quantized else nn.Parameter(tensor, requires_grad=False)
        setattr(self.module, self.parameter, stored)
        return stored


def places_of(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Every checkpoint tensor that the model takes, and where it goes."""
    for path, module in model.named_modules():
        # What a quantised layer has beside its weight is not read as it is.
        quantized = isinstance(module, QuantizedLinear)
        tensors = [("weight", module.weight)] if quantized else module.named_parameters(recurse=False)
        for name, tensor in tensors:
            if not isinstance(module, MergedLinear | QuantizedLinear) or not module.parts:
                yield f"{path}.{name}".lstrip("."), Place(module, name, 0, tuple(tensor.shape))
                continue
            start = 0
            for layer, rows in named_parts(path, module):
                yield f"{layer}.{name}", Place(module, name, start, (rows, *tensor.shape[1:]))
                start += rows
