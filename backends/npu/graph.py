"""NPUGraph, with the host values of attention.

torch_npu puts an event and a task group around each attention that it sees in a capture. A replay stops at each until
its task has been updated, so replay and update overlap: the replay is started first, and the update goes on beside it.
What torch_npu leaves to the caller is done here: names and counts are checked before anything is launched, an update
waits, on the device, until the replay before it has read its own, and a failure frees the device again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal import ops
from hal.device.graph import Graph
from hal.device.host_values import HostValue
from hal.device.stream import Stream
from hal.errors import CaptureError, GraphError, HalError, HostValueError

from .capture_watch import HostCall, Watch
from .device import NpuDevice
from .failures import explain_in_capture, first_line
from .lengths import PackedLengths, Update, updates_of

PATIENCE = 60
"""Seconds that a broken replay gets to run to its end, before waiting for the device says what holds it."""
UPDATING = threading.RLock()
"""Held from the start of a replay until its update is complete, and while a failure is dealt with.

An update is several calls on a stream, and torch_npu hands out the same few streams to every backend and thread: two
updates at once would write into each other's task groups. In one step, too, every update stands behind all replays
before its own, so that none of them waits for another in a circle.
"""


class NpuGraph(Graph):
    """See the module. Its outputs are held weakly: their memory is the pool's, which later captures use too."""

    def __init__(self, device: NpuDevice) -> None:
        super().__init__()
        self._device = device
        self._graph: Any = None
        self._distinct: list[dict[str, Update]] = []
        self._updates: list[int] = []
        self._fixed: dict[str, Tensor] = {}
        self._checks: list[PackedLengths] = []
        self._replayed: Any = None
        self._kept: Any = None
        self._watch: Watch | None = None
        self._begun = False
        self._failures: int | None = 0  # that the device had at the last replay; None while one is being launched

    def dump(self, path: Path) -> None:
        """Write CANN's listing of the captured tasks, in JSON."""
        self._require_capture("dump")
        self._graph.debug_dump(str(path))

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Watch]:
        return self._watching(stream)

    @contextmanager
    def _watching(self, stream: Stream | None) -> Iterator[Watch]:
        with torch_npu.npu.device(self._device.torch):
            self._device.synchronize()
            torch_npu.npu.empty_cache()
            watch = Watch()
            with torch_npu.npu.stream(self._stream(stream)), ops.intercepted(watch.wrap), watch:
                yield watch

    def _begin(self, context: Watch, pool: Any) -> None:
        if pool is not None and not (isinstance(pool, tuple) and all(isinstance(each, int) for each in pool)):
            raise GraphError(
                f"{pool!r} is not the pool of an NPUGraph", "pass the pool of another graph of this backend"
            )
        graph = self._graph = torch_npu.npu.NPUGraph()
        graph.auto_dispatch_capture = True
        mode = graph.graph_dispatch_mode
        mode.update_stream = self._device.side_streams[0]  # torch_npu's own is of the first device that captured
        # Not torch_npu.npu.graph, which enters a mode and a stream for each graph, and leaves both behind if the end of
        # a capture fails. Other threads may copy and allocate meanwhile.
        self._watch, self._begun = context, True  # before, as an interrupt may come right behind the call
        try:
            graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        except Exception:
            self._begun = False
            raise
        context.hand_to(mode, self.host_values)

    def _end(self, made: Any) -> tuple[Any, Any]:
        calls = self._stop()
        graph, mode = self._graph, self._graph.graph_dispatch_mode
        self._kept = made if self._holds else None
        outputs = tree_map_only(Tensor, torch_npu._C._weak_ref_tensor, made)
        self._check_counts(calls, mode.graph_dispatch_records)
        keys = [self._update_of(record) for record in mode.graph_dispatch_records]
        self._distinct = [each for index, each in enumerate(keys) if each not in keys[:index]]
        self._updates = [self._distinct.index(each) for each in keys]
        self._checks = [each for keys in self._distinct for each in keys.values() if isinstance(each, PackedLengths)]
        self.may_refuse = bool(self._checks)
        if any("actual_seq_lengths" not in each for each in self._distinct):
            # One query a sequence: that is part of what was captured, and no replay can change it.
            self._fixed = {
                name: tensor.clone() for name, tensor in self.host_values.items() if name == "query_start_loc_host"
            }
        self._replayed = torch_npu.npu.Event()
        self._failures = self._device.count_failures()
        return outputs, graph.pool()

    def _abandon(self) -> None:
        self._stop()

    def _stop(self) -> list[HostCall]:
        """End the capture that was begun; return the calls that it met."""
        watch, self._watch = self._watch, None
        calls = [] if watch is None else watch.stop()
        if self._begun:
            try:
                self._graph.capture_end()
            except Exception:
                self._begun = False
                raise
            self._begun = False
        return calls

    def _stream(self, stream: Stream | None) -> Any:
        if stream is None:
            return self._device.capture_stream
        given = stream.torch
        return torch_npu.npu.Stream(
            stream_id=given.stream_id, device_index=given.device_index, device_type=given.device_type
        )

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

    def refusal(self, host_values: Mapping[str, HostValue]) -> str | None:
        """Lengths that attention was not captured for: more blocks, counted for each sequence, than the cache has."""
        return next(filter(None, (check.refusal(host_values) for check in self._checks)), None)

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
        index = self._device.torch.index
        if torch_npu.npu.current_device() == index:
            self._start(updates)
        else:  # of another thread, say, which begins with device 0
            with torch_npu.npu.device(index):
                self._start(updates)

    def _start(self, updates: list[dict[str, Any]]) -> None:
        with UPDATING:
            self._replay_and_update(updates)

    def _replay_and_update(self, updates: list[dict[str, Any]]) -> None:
        if self._failures != (failures := self._device.count_failures()):
            failures = self._recover()
        if not updates:
            self._graph.replay()
            return
        mode = self._graph.graph_dispatch_mode
        mode.update_stream = self._device.stream_beside(torch_npu.npu.current_stream())
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
        """After a failure: let go on what still waits, and leave no flag up for the next replay to take for its own.

        Another thread's failure counts as well, and the replay before it may be under way, and right. Its flags stay
        as they are until its update is done.
        """
        mode, current = self._graph.graph_dispatch_mode, torch_npu.npu.current_stream()
        records, broke_off = mode.graph_dispatch_records, self._failures is None
        stream = self._device.stream_beside(current, mode.update_stream)
        if broke_off:
            with suppress(RuntimeError):  # an update that broke off left its task group open
                torch_npu.npu.graph_task_update_end(mode.update_stream)
        # Again and again: a replay before the one that broke off may lower a flag that was raised for the latter.
        behind, updated, until = torch_npu.npu.Event(), torch_npu.npu.Event(), time.monotonic() + PATIENCE
        with suppress(RuntimeError):  # the failure that brought us here, once more
            behind.record(current)
            updated.record(mode.update_stream)
            while not behind.query() and time.monotonic() < until:
                if broke_off or updated.query():
                    for record in records:
                        record.event.record(stream)
                time.sleep(0.001)
        # Not the whole device: another thread may be capturing on it.
        used = (current, mode.update_stream, stream)
        for each in used:
            with suppress(HalError):
                self._device.wait_for(each)
        for record in records:
            record.event.record(stream)
            record.event.wait(stream)  # which lowers the flag; torch_npu's reset() does so in a capture only
        for each in used:
            self._device.wait_for(each)
        self._replayed = torch_npu.npu.Event()  # the other may hand the failure on to whoever waits for it
        self._failures = failures = self._device.count_failures()
        return failures

    def _explain(self, error: Exception) -> HalError | None:
        return explain_in_capture(error)

    def _let_go(self) -> None:
        self._kept = None

    def _release(self) -> None:
        graph, self._graph = self._graph, None
        self._kept = None
        self._distinct, self._updates, self._fixed, self._replayed = [], [], {}, None
        if graph is not None:
            graph.reset()
