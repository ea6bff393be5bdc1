"""Recording of the calls with host values during a capture, and of torch_npu's updatable launches for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch.utils._python_dispatch import TorchDispatchMode

from hal.device.host_values import HostValues
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel


@attrs.frozen
class HostCall:
    """A captured call of an operation that reads host values.

    Attributes:
        operation: the operation's name.
        recorded: the number of updatable launches that torch_npu recorded for the call; normally 1.
        updates: whether the kernel's launches need updates. If not, it reads lengths on the device.
        fixes: whether replays need the capture's numbers of queries.
        names: the host values' names in replays, by the operation's arguments.
    """

    operation: str
    recorded: int
    updates: bool
    fixes: bool
    names: Mapping[str, str]


class CaptureWatch(TorchDispatchMode):
    """A dispatch mode that forwards calls to torch_npu's mode of the current graph, and records host values.

    torch_npu enters one mode for each graph. This mode stays active across several graphs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode: Any = None
        self._host_values: HostValues | None = None
        self._calls: list[HostCall] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as torch_npu's mode does."""
        return True

    def start(self, mode: Any, host_values: HostValues) -> None:
        """Forward calls to the mode of a graph, and record its host values."""
        self._mode, self._host_values, self._calls = mode, host_values, []

    def stop(self) -> list[HostCall]:
        """Stop forwarding and recording; return the recorded calls with host values."""
        self._mode = self._host_values = None
        calls, self._calls = self._calls, []
        return calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs) if self._mode is None else self._mode.__torch_dispatch__(func, types, args, kwargs)

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """Return a kernel that records each call with host values and the launches torch_npu recorded for it."""
        if not operation.host:
            return kernel
        chosen: Callable[..., Kernel] = getattr(kernel, "chosen", lambda *args: kernel)

        def recording(*args: Any, **kwargs: Any) -> Any:
            if self._mode is None or self._host_values is None:
                return kernel(*args, **kwargs)
            records = self._mode.graph_dispatch_records
            arguments, before = operation.arguments(args, kwargs), len(records)
            names = {name: self._host_values.record(name, arguments[name], operation.name) for name in operation.host}
            result = kernel(*args, **kwargs)
            ran = chosen(*arguments.values())
            updates = getattr(ran, "updates", True)
            fixes = getattr(ran, "fixes_queries", not updates)
            self._calls.append(HostCall(operation.name, len(records) - before, updates, fixes, names))
            return result

        return recording
