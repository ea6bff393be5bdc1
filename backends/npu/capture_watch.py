"""What a capture on the NPU is watched for: calls with host values, and what torch_npu records of them."""

from __future__ import annotations

from typing import Any

import attrs
from torch.utils._python_dispatch import TorchDispatchMode

from hal.device.host_values import HostValues
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel


@attrs.frozen
class HostCall:
    """An operation that reads host values, as the capture met it.

    Attributes:
        operation: its name.
        recorded: how many updatable launches torch_npu recorded for it: one, if it was seen.
    """

    operation: str
    recorded: int


class Watch(TorchDispatchMode):
    """Hands the calls of a capture to torch_npu's dispatch mode of its graph, and notes those that read host values.

    torch_npu has one mode for each graph, which is entered with it. This one stays on for several graphs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode: Any = None
        self._host_values: HostValues | None = None
        self._calls: list[HostCall] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """As torch_npu's."""
        return True

    def hand_to(self, mode: Any, host_values: HostValues) -> None:
        """Watch a graph's capture from now on."""
        self._mode, self._host_values, self._calls = mode, host_values, []

    def stop(self) -> list[HostCall]:
        """Let everything pass from now on; return the calls with host values that the capture met."""
        self._mode = self._host_values = None
        calls, self._calls = self._calls, []
        return calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs) if self._mode is None else self._mode.__torch_dispatch__(func, types, args, kwargs)

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """The interception that notes every call with host values, and whether torch_npu recorded a launch of it."""
        if not operation.host:
            return kernel

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._mode is None or self._host_values is None:
                return kernel(*args, **kwargs)
            records = self._mode.graph_dispatch_records
            arguments, before = operation.arguments(args, kwargs), len(records)
            for name in operation.host:
                self._host_values.record(name, arguments[name], operation.name)
            result = kernel(*args, **kwargs)
            self._calls.append(HostCall(operation.name, len(records) - before))
            return result

        return noted
