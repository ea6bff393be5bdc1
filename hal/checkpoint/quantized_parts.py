"""Quantized layers while they are loaded: their parts in the checkpoint, and the tensors that schemes compute."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor, nn

from hal.drivers.backend import Backend
from hal.errors import CheckpointError
from hal.nn import Weight, WeightUse
from hal.quantization.scheme import Scheme, TensorSpec


@attrs.frozen(eq=False)
class QuantizedPart:
    """A layer of the checkpoint, which is one of the model's layers or a part of one.

    Attributes:
        layer: the model's layer.
        rows: the rows of its weight.
        first_values: the tensors that it has before any is read: empty ones of another rank's expert.
        first_statistics: the statistics that it has before any row is read.
        values: the tensors other than its weight that have been read.
        statistics: the statistics of its weight's rows that have been read.
    """

    name: str
    layer: nn.Module
    rows: int
    scheme: Scheme
    specs: Mapping[str, TensorSpec]
    first_values: Mapping[str, Tensor] = attrs.field(factory=dict)
    first_statistics: tuple[Tensor, ...] = ()
    values: dict[str, Tensor] = attrs.field(init=False, factory=dict)
    statistics: list[Tensor] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget what has been read."""
        self.values.clear()
        self.values.update(self.first_values)
        self.statistics[:] = self.first_statistics


@attrs.frozen(eq=False)
class QuantizedLayer:
    """A layer of the model, and its layers in the checkpoint."""

    module: nn.Module
    scheme: Scheme
    parts: tuple[QuantizedPart, ...]


@attrs.frozen(eq=False)
class Computed:
    """A tensor that a scheme computed for a layer, on the CPU.

    Attributes:
        module: the model's layer.
        part: the name of its first layer in the checkpoint.
        name: the tensor's name in the layer.
        value: the tensor; None for a layer without it.
        weight: its declaration.
    """

    module: nn.Module
    part: str
    name: str
    value: Tensor | None
    weight: Weight

    def set(self, backend: Backend, dtype: torch.dtype) -> bool:
        """Set the tensor of the layer. Return whether the backend changed its format."""
        if self.value is None:
            setattr(self.module, self.name, None)
            return False
        moved = self.value.to(backend.device.torch)
        use = self._use(dtype)
        prepared = moved if use is None else backend.prepare_weight(moved, use)
        setattr(self.module, self.name, prepared)
        return prepared is not moved

    def check_replaces(self) -> None:
        """Raise CheckpointError unless the layer has such a tensor too, or neither has one."""
        if (self.value is None) != (getattr(self.module, self.name) is None):
            new, old = ("none", "one") if self.value is None else ("one", "none")
            raise CheckpointError(
                f"the new tensors give {self.part} {new} in place of its {self.name}, and it was loaded with {old}",
                "load the new weights with hal.load_model, for another runner",
            )

    def replace(self, backend: Backend, dtype: torch.dtype) -> None:
        """Write the values into the layer's tensor."""
        if self.value is None:
            return
        held, moved, use = getattr(self.module, self.name), self.value.to(backend.device.torch), self._use(dtype)
        if use is None:
            held.copy_(moved)
        else:
            backend.replace_weight(held, moved, use)

    def _use(self, dtype: torch.dtype) -> WeightUse | None:
        consumer = self.weight.consumer
        return None if consumer is None else WeightUse(consumer.operation, consumer.argument, dtype)
