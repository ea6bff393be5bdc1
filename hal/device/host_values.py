"""Host values: the values that a captured graph's launches read on the host, and the validation of new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from hal.errors import CaptureError, HostValueError, nearest

HostValue = Tensor | Sequence[int]


class HostValues:
    """The host values of one graph: recorded by the capture, and validated by every replay.

    Args:
        names: the names of tensors that launches read, where it is not the argument's. An encoder whose layers call one
            operation with several lists of starts needs them.

    Attributes:
        tensors: the tensors that the launches read, by name.
    """

    def __init__(self, names: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._given = {tensor.data_ptr(): name for name, tensor in names.items()}

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def items(self) -> list[tuple[str, Tensor]]:
        """Return the names, and the tensors that the launches read."""
        return list(self.tensors.items())

    def record(self, name: str, tensor: Tensor, operation: str) -> str:
        """Record that a launch of ``operation`` reads ``tensor`` on the host as its argument ``name``.

        Returns:
            The tensor's name in replays.
        """
        name = self._given.get(tensor.data_ptr(), name)
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{operation} was called with {name} on {tensor.device}; a host value must be a CPU tensor",
                "pass the host twin of the tensor, a field of hal.step.Batch",
            )
        known = self.tensors.setdefault(name, tensor)
        if known.data_ptr() != tensor.data_ptr() or known.shape != tensor.shape:
            raise CaptureError(
                f"two launches in one capture read different tensors as {name}; replays update one per name",
                "pass the same tensor to every operation of the captured function",
            )
        return name

    def check(self, values: Mapping[str, HostValue]) -> dict[str, Tensor]:
        """Return ``values`` as tensors. Raise HostValueError if a name, shape or dtype is wrong."""
        if values.keys() != self.tensors.keys():
            for name in values:
                if name not in self.tensors:
                    raise HostValueError(
                        f"the graph has no host value {name!r}; {nearest(name, self.tensors)}",
                        "pass the names that were captured",
                    )
            missing = sorted(set(self.tensors) - set(values))
            raise HostValueError(
                f"the replay lacks the host values {', '.join(missing)}", "pass every host value to every replay"
            )
        found = {}
        for name, value in values.items():
            known = self.tensors[name]
            if isinstance(value, Tensor) and value.is_cpu and value.dtype == known.dtype and value.shape == known.shape:
                found[name] = value
            else:
                found[name] = self._fit(name, value)
        return found

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy validated ``values`` into the tensors that the launches read."""
        for name, value in values.items():
            self.tensors[name].copy_(value)

    def _fit(self, name: str, value: HostValue) -> Tensor:
        expected = self.tensors[name]
        if not isinstance(value, Tensor):
            if not (isinstance(value, Sequence) and all(type(number) is int for number in value)):
                raise HostValueError(
                    f"the host value {name} is {value!r:.70}, not a CPU tensor or integers",
                    "pass a CPU tensor, or a list of integers",
                )
            try:
                value = torch.tensor(value, dtype=expected.dtype)
            except RuntimeError as error:
                raise HostValueError(f"the host value {name}: {error}", f"pass numbers of {expected.dtype}") from None
        if not value.is_cpu or value.dtype != expected.dtype or value.shape != expected.shape:
            raise HostValueError(
                f"the host value {name} must be {_describe(expected)}, found {_describe(value)}",
                "pad host values to the shape of the capture, and keep its dtype",
            )
        return value


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
