"""Host values: what the launches of a captured graph read on the host, by name, and the check of new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hal.errors import CaptureError, HostValueError, nearest

HostValue = Tensor | Sequence[int]


class HostValues:
    """The host values of one graph: what the capture met, by name, and the check that every replay passes."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> list[tuple[str, Tensor]]:
        """The names, and the tensors that the launches read."""
        return list(self._tensors.items())

    def record(self, name: str, tensor: Tensor, operation: str) -> None:
        """Note that a launch of ``operation`` reads ``tensor`` on the host as its argument ``name``."""
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{operation} was given {name} on {tensor.device}; a host value must be a CPU tensor",
                "pass the host twin of the tensor, as hal.Batch carries it",
            )
        known = self._tensors.setdefault(name, tensor)
        if known.data_ptr() != tensor.data_ptr() or known.shape != tensor.shape:
            raise CaptureError(
                f"two launches in one capture take different tensors as {name}, so one name cannot update both",
                "pass the same tensor to every operation of the captured function",
            )

    def check(self, values: Mapping[str, HostValue]) -> dict[str, Tensor]:
        """Return ``values`` as tensors fit to be copied; raise HostValueError if any name, shape or dtype is off."""
        for name in values:
            if name not in self._tensors:
                raise HostValueError(
                    f"the graph has no host value {name!r}; {nearest(name, self._tensors)}", "pass the names it has"
                )
        if len(values) < len(self._tensors):
            missing = sorted(set(self._tensors) - set(values))
            raise HostValueError(
                f"the replay lacks the host values {', '.join(missing)}", "pass every host value at every replay"
            )
        return {name: self._fit(name, value) for name, value in values.items()}

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy checked ``values`` into the tensors that the launches read."""
        for name, value in values.items():
            self._tensors[name].copy_(value)

    def _fit(self, name: str, value: HostValue) -> Tensor:
        expected = self._tensors[name]
        if not isinstance(value, Tensor):
            if not (isinstance(value, Sequence) and all(type(number) is int for number in value)):
                raise HostValueError(f"host value {name} is {value!r:.70}", "pass a CPU tensor, or a list of integers")
            try:
                value = torch.tensor(value, dtype=expected.dtype)
            except RuntimeError as error:
                raise HostValueError(f"host value {name}: {error}", "pass numbers that its dtype holds") from None
        if not value.is_cpu or value.dtype != expected.dtype or value.shape != expected.shape:
            raise HostValueError(
                f"host value {name} must be {_describe(expected)}, found {_describe(value)}",
                "host values keep the shape and dtype of the capture; pad to the bucket's size",
            )
        return value


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
