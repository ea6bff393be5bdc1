"""NPUGraph, with the host values of attention.

torch_npu puts an event and a task group around each attention that it sees in a capture. A replay stops at each until
its task has been updated, so replay and update overlap: the replay is started first, and the update goes on beside it.
What torch_npu leaves to the caller is done here: names and counts are checked before anything is launched, an update
waits, on the device, until the replay before it has read its own, and a failure frees the device again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch_npu
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal import ops
from hal.errors import CaptureError, DeviceOutOfMemory, GraphError, HalError, HostValueError
from hal.graph import Graph
from hal.ops.declaration import Kernel, Operation
from hal.stream import Stream

from .failures import CAPTURE_BROKEN, CAPTURE_REMEDIES, OUT_OF_MEMORY, codes_of, first_line
from .lengths import Update, updates_of

if TYPE_CHECKING:
    from .driver import NpuBackend

PATIENCE = 60
"""Seconds that a broken replay gets to run to its end, before waiting for the device says what holds it."""


@attrs.frozen
class HostCall:
    """An operation that reads host values, as the capture met it.

    Attributes:
        operation: its name.
        recorded: how many updatable launches torch_npu recorded for it: one, if it was seen.
    """

    operation: str
    recorded: int


class NpuGraph(Graph):
    """See the module. Its outputs are held weakly: their memory is the pool's, which later captures use too."""

    def __init__(self, backend: NpuBackend) -> None:
        super().__init__()
        self._backend = backend
        self._graph: Any = None
        self._distinct: list[dict[str, Update]] = []
        self._updates: list[int] = []
        self._fixed: dict[str, Tensor] = {}
        self._replayed: Any = None
        self._made: Any = None
        self._kept: Any = None
        self._failures: int | None = 0  # that the device had at the last replay; None while one is being launched

    def dump(self, path: Path) -> None:
        """Write CANN's listing of the captured tasks, in JSON."""
        self._require_capture("dump")
        self._graph.debug_dump(str(path))

    def _capture(self, fn: Callable[[], Any], pool: Any, stream: Stream | None) -> tuple[Any, Any]:
        if pool is not None and not (isinstance(pool, tuple) and all(isinstance(each, int) for each in pool)):
            raise GraphError(
                f"{pool!r} is not the pool of an NPUGraph", "pass the pool of another graph of this backend"
            )
        graph = self._graph = torch_npu.npu.NPUGraph()
        graph.auto_dispatch_capture = True
        mode = graph.graph_dispatch_mode
        mode.update_stream = self._backend.update_stream  # torch_npu's own is of the first device that captured
        calls: list[HostCall] = []
        with torch_npu.npu.device(self._backend.device.torch):
            self._backend.device.synchronize()
            torch_npu.npu.empty_cache()
            try:
                with torch_npu.npu.stream(self._stream(stream)), ops.intercepted(self._watch(mode, calls)):
                    self._record(graph, mode, fn, () if pool is None else (pool,))
            except HalError:
                raise
            except Exception as error:
                raise capture_error(error) from error
            outputs, self._made = self._made, None
            self._kept = outputs if self._holds else None
            outputs = tree_map_only(Tensor, torch_npu._C._weak_ref_tensor, outputs)
        self._check_counts(calls, mode.graph_dispatch_records)
        keys = [self._update_of(record) for record in mode.graph_dispatch_records]
        self._distinct = [each for index, each in enumerate(keys) if each not in keys[:index]]
        self._updates = [self._distinct.index(each) for each in keys]
        if any("actual_seq_lengths" not in each for each in self._distinct):
            # One query a sequence: that is part of what was captured, and no replay can change it.
            self._fixed = {
                name: tensor.clone() for name, tensor in self.host_values.items() if name == "query_start_loc_host"
            }
        self._replayed = torch_npu.npu.Event()
        self._failures = self._backend.npu.count_failures()
        return outputs, graph.pool()

    def _record(self, graph: Any, mode: Any, fn: Callable[[], Any], pool: tuple[Any, ...]) -> None:
        # Not torch_npu.npu.graph: if the end of a capture fails, that leaves its dispatch mode and its stream behind.
        with mode:
            # Other threads may copy and allocate meanwhile.
            graph.capture_begin(*pool, capture_error_mode="thread_local")
            try:
                self._made = fn()
            except BaseException as error:
                try:
                    graph.capture_end()
                except RuntimeError as end:
                    error.add_note(f"the capture's end: {first_line(end)}")
                raise
            graph.capture_end()

    def _stream(self, stream: Stream | None) -> Any:
        if stream is None:
            return self._backend.capture_stream
        given = stream.torch
        return torch_npu.npu.Stream(
            stream_id=given.stream_id, device_index=given.device_index, device_type=given.device_type
        )

    def _watch(self, mode: Any, calls: list[HostCall]) -> Callable[[Operation, Kernel], Kernel]:
        """The interception that notes every call with host values, and whether torch_npu recorded a launch of it."""

        def wrap(operation: Operation, kernel: Kernel) -> Kernel:
            if not operation.host:
                return kernel

            def noted(*args: Any, **kwargs: Any) -> Any:
                arguments, before = operation.arguments(args, kwargs), len(mode.graph_dispatch_records)
                for name in operation.host:
                    self.host_values.record(name, arguments[name], operation.name)
                result = kernel(*args, **kwargs)
                calls.append(HostCall(operation.name, len(mode.graph_dispatch_records) - before))
                return result

            return noted

        return wrap

    def _check_counts(self, calls: list[HostCall], records: list[Any]) -> None:
        unseen = [call.operation for call in calls if call.recorded == 0]
        if unseen:
            raise CaptureError(
                f"{len(unseen)} of {len(calls)} calls with host values ({', '.join(sorted(set(unseen)))}) were not "
                "recorded for updates: their lengths would stay those of the capture",
                "call hal.ops in the captured function, not torch.ops.hal: torch_npu does not see inside a dispatched "
                "operation",
            )
        seen = sum(call.recorded for call in calls)
        if len(records) != seen:
            raise CaptureError(
                f"torch_npu recorded {len(records)} launches to update, and hal's operations made {seen} of them",
                "reach attention through hal.ops.paged_attention, so that replays know its lengths by name",
            )

    def _update_of(self, record: Any) -> dict[str, Update]:
        """What an update gives one record: those keys of its operation that it was captured with."""
        found = updates_of(record)
        if found is None:
            raise CaptureError(
                f"the launch {record.op_cache_entry.__name__} takes host values, and the driver knows none of their "
                "names",
                "report it to the driver's maintainers",
            )
        return found

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        for name, fixed in self._fixed.items():
            if not torch.equal(host_values[name], fixed):
                raise HostValueError(
                    f"the graph was captured with {name} {fixed.tolist()}, which no replay can change",
                    "replay it for one query a sequence, or capture another graph",
                )
        # Made once each: records of the same operation have the same keys, and may share what torch_npu only reads.
        made = [{key: update(host_values) for key, update in keys.items()} for keys in self._distinct]
        updates = [made[index] for index in self._updates]
        index = self._backend.device.torch.index
        if torch_npu.npu.current_device() == index:
            self._start(updates)
        else:  # of another thread, say, which begins with device 0
            with torch_npu.npu.device(index):
                self._start(updates)

    def _start(self, updates: list[dict[str, Any]]) -> None:
        if self._failures != (failures := self._backend.npu.count_failures()):
            failures = self._recover()
        if not updates:
            self._graph.replay()
            return
        mode = self._graph.graph_dispatch_mode
        self._failures = None  # whatever breaks this off, an interrupt between two lines too, the next replay sees it
        try:
            self._graph.replay()
            # The replay before this one may still be on its way to an attention, and must not meet these values.
            mode.update_stream.wait_event(self._replayed)
            self._graph.update(cpu_update_input=updates)
            self._replayed.record()
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            raise GraphError(
                f"the host values of a replay could not be set, and its results are void: {first_line(error)}",
                "replay again; if it repeats, run the phase with the compiler eager, and report it",
            ) from error
        self._failures = failures

    def _recover(self) -> int:
        """After a failure: let go on what still waits, and leave no flag up for the next replay to take for its own."""
        mode = self._graph.graph_dispatch_mode
        records, stream = mode.graph_dispatch_records, self._backend.capture_stream
        with suppress(RuntimeError):  # an update that broke off left its task group open
            torch_npu.npu.graph_task_update_end(mode.update_stream)
        # Again and again: a replay before the one that broke off may lower a flag that was raised for the latter.
        behind, until = torch_npu.npu.Event(), time.monotonic() + PATIENCE
        with suppress(RuntimeError):  # the failure that brought us here, once more
            behind.record()
            while not behind.query() and time.monotonic() < until:
                for record in records:
                    record.event.record(stream)
                time.sleep(0.001)
        with suppress(HalError):
            self._backend.device.synchronize()
        for record in records:
            record.event.record(stream)
            record.event.wait(stream)  # which lowers the flag; torch_npu's reset() does so in a capture only
        self._backend.device.synchronize()
        self._replayed = torch_npu.npu.Event()  # the other may hand the failure on to whoever waits for it
        self._failures = failures = self._backend.npu.count_failures()
        return failures

    def _let_go(self) -> None:
        self._kept = None

    def _release(self) -> None:
        graph, self._graph = self._graph, None
        self._made = self._kept = None
        self._distinct, self._updates, self._fixed, self._replayed = [], [], {}, None
        if graph is not None:
            graph.reset()


def capture_error(error: Exception) -> CaptureError:
    """What broke a capture, in words."""
    notes = " ".join(getattr(error, "__notes__", ()))
    codes = codes_of(error) + codes_of(RuntimeError(notes))
    if isinstance(error, torch.OutOfMemoryError) or set(codes) & set(OUT_OF_MEMORY):  # of torch's, or for an event
        return CaptureError(
            f"the NPU has no memory left for the capture: {first_line(error)}",
            f"capture fewer sizes: lower compilation.max_capture_size; or {DeviceOutOfMemory.REMEDY}",
        )
    # The end of a capture that broke earlier says so, and then why.
    for code in sorted(codes, key=lambda each: each == CAPTURE_BROKEN):
        if code in CAPTURE_REMEDIES:
            cause, remedy = CAPTURE_REMEDIES[code]
            return CaptureError(
                f"the captured function cannot be captured: {cause} ({code}; {first_line(error)})", remedy
            )
    return CaptureError(
        f"the captured function failed: {type(error).__name__}: {first_line(error)}",
        "run it eagerly to see whether the capture is at fault",
    )
