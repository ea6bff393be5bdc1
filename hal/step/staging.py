"""Host memory for the tensors of a batch, which reach the device in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.device.device import Device, Event
from hal.step.batch import Batch
from hal.step.fields import Field, fields_of

_ALIGNMENT = 64
_LAYOUTS = 64
"""The number of layouts to keep: a running engine repeats a few sizes."""


@attrs.frozen(eq=False)
class Layout:
    """Where the fields of a batch of given sizes lie.

    Attributes:
        host: arrays to write the fields to.
        tensors: the fields of the batch: tensors on the device, and host twins.
        nbytes: the bytes to copy.
    """

    host: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    nbytes: int


class Staging:
    """Writes batches to pinned host memory, and copies each to the device at once.

    Args:
        batch_type: the class of the batches.
        device: the device. On the host nothing is copied, and the batch reads this memory.

    Attributes:
        fields: the fields that are copied, by name.
    """

    def __init__(self, batch_type: type[Batch], device: Device) -> None:
        declared = fields_of(batch_type)
        self.fields: Mapping[str, Field] = {
            name: each
            for name, each in sorted(declared.items(), key=lambda item: -item[1].dtype.itemsize)
            if each.twin_of is None and each.default is None
        }
        self._twins = {name: each.twin_of for name, each in declared.items() if each.twin_of in self.fields}
        self._device = device
        self._copies = device.torch.type != "cpu"
        self._host = self._target = torch.empty(0, dtype=torch.uint8)
        self._copied: Event | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def layout(self, sizes: Mapping[str, int]) -> Layout:
        """Return the memory for a batch of these sizes, with any values, once an earlier copy has read it."""
        if self._copied is not None:
            self._copied.synchronize()
        key = tuple(sizes.values())
        found = self._layouts.pop(key, None) or self._make(sizes)
        self._layouts[key] = found  # The most recent is the last.
        if len(self._layouts) > _LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return found

    def send(self, layout: Layout) -> None:
        """Enqueue the copy to the device on the current stream."""
        if self._copies:
            self._target[: layout.nbytes].copy_(self._host[: layout.nbytes], non_blocking=True)
            self._copied = self._copied or self._device.event()
            self._copied.record()

    def _make(self, sizes: Mapping[str, int]) -> Layout:
        starts, end = dict[str, int](), 0
        for name, each in self.fields.items():
            starts[name] = end
            nbytes = math.prod(each.shape(sizes)) * each.dtype.itemsize
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._host.numel():
            self._grow(2 * end)

        def of(memory: Tensor, name: str) -> Tensor:
            each = self.fields[name]
            shape = each.shape(sizes)
            nbytes = math.prod(shape) * each.dtype.itemsize
            return memory[starts[name] : starts[name] + nbytes].view(each.dtype).view(shape)

        tensors = {name: of(self._target, name) for name in self.fields}
        twins = {name: of(self._host, source) for name, source in self._twins.items() if source is not None}
        arrays = {name: of(self._host, name).numpy() for name in self.fields}
        return Layout(arrays, tensors | twins, end)

    def _grow(self, nbytes: int) -> None:
        self._layouts.clear()
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._copies)
        self._target = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch) if self._copies else self._host
