"""Graphs on torch_npu's NPUGraph, with updates of attention's host values.

torch_npu puts an event and a task group around each attention that it sees in a capture. A replay waits at each event
until its task has been updated. The replay starts first, and the update runs on another stream at the same time.

This module adds what torch_npu leaves to its caller. Names and counts are checked before any launch. An update waits
on the device until the previous replay has read its values. After a failure, :meth:`NpuGraph._recover` releases the
tasks that still wait.
"""

from __future__ import annotations

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
from hal.device.device import Stream
from hal.device.graph import Graph
from hal.errors import CaptureError, CommunicationError, GraphError, HalError, HostValueError

from .device import UPDATING, NpuDevice, native_stream
from .failures import explain, explain_in_capture, first_line
from .lengths import (
    CaptureWatch,
    HostCall,
    PackedLengths,
    Update,
    counts_blocks,
    packed_lengths,
    updates_of,
    updates_queries,
)

RECOVERY_TIMEOUT = 60
"""Seconds to let a failed replay finish. After that, waiting for the device raises the device's own error."""


class NpuGraph(Graph):
    """A graph on torch_npu's NPUGraph. It holds its outputs weakly: their memory belongs to the pool."""

    def __init__(self, device: NpuDevice) -> None:
        super().__init__()
        self._device = device
        self._graph: Any = None
        self._distinct: list[tuple[dict[str, Update], Mapping[str, str]]] = []
        self._updates: list[int] = []
        self._fixed: dict[str, list[int]] = {}
        self._limits: list[PackedLengths] = []
        self._replayed: Any = None
        self._kept: Any = None
        self._watch: CaptureWatch | None = None
        self._begun = False
        self._failures: int | None = 0  # the device's count at the last replay; None while a replay is launched

    def dump(self, path: Path) -> None:
        """Write CANN's list of the captured tasks to a JSON file."""
        self._require_capture("dump")
        self._graph.debug_dump(str(path))

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[CaptureWatch]:
        return self._watching(stream)

    @contextmanager
    def _watching(self, stream: Stream | None) -> Iterator[CaptureWatch]:
        with torch_npu.npu.device(self._device.torch):
            self._device.synchronize()
            self._device.empty_cache()
            watch = CaptureWatch()
            with torch_npu.npu.stream(self._stream(stream)), ops.intercepted(watch.wrap), watch:
                yield watch

    def _begin(self, context: CaptureWatch, pool: Any) -> None:
        if pool is not None and not (isinstance(pool, tuple) and all(isinstance(each, int) for each in pool)):
            raise GraphError(
                f"{pool!r} is not the pool of an NPUGraph", "pass the pool of another graph of this backend"
            )
        graph = self._graph = torch_npu.npu.NPUGraph()
        graph.auto_dispatch_capture = True
        mode = graph.graph_dispatch_mode
        mode.update_stream = self._device.side_streams[0]  # torch_npu's default is on the first device that captured
        # torch_npu.npu.graph is not used: it enters a mode and a stream for each graph, and leaves both active if the
        # end of a capture fails. The error mode thread_local lets other threads copy and allocate during a capture.
        self._watch, self._begun = context, True  # set first: an interrupt may arrive right after the call
        try:
            graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        except Exception:
            self._begun = False
            raise
        context.start(mode, self.host_values)

    def _end(self, made: Any) -> tuple[Any, Any]:
        calls = self._stop()
        graph, mode = self._graph, self._graph.graph_dispatch_mode
        self._kept = made if self._holds else None
        outputs = tree_map_only(Tensor, torch_npu._C._weak_ref_tensor, made)
        self._check_counts(calls, mode.graph_dispatch_records)
        names = [call.names for call in calls for _ in range(call.recorded)]
        keys = [(self._update_of(each), of) for each, of in zip(mode.graph_dispatch_records, names, strict=True)]
        self._distinct = [each for index, each in enumerate(keys) if each not in keys[:index]]
        self._updates = [self._distinct.index(each) for each in keys]
        packed = [each for each in mode.graph_dispatch_records if counts_blocks(each.op_cache_entry, each)]
        self._limits = list(dict.fromkeys(map(packed_lengths, packed)))
        if not all(updates_queries(each) for each, _ in self._distinct) or any(each.fixes for each in calls):
            # The captured launch fixes one query per sequence, and no replay can change it.
            self._fixed = {
                name: tensor.tolist() for name, tensor in self.host_values.items() if name == "query_start_loc_host"
            }
        self._replayed = torch_npu.npu.Event()
        self._failures = self._device.count_failures()
        return outputs, graph.pool()

    def _abandon(self) -> None:
        self._stop()

    def _stop(self) -> list[HostCall]:
        """End the capture; return the recorded calls with host values."""
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
        return native_stream(stream.torch)

    def _check_counts(self, calls: list[HostCall], records: list[Any]) -> None:
        unseen = [call.operation for call in calls if call.updates and call.recorded == 0]
        if unseen:
            raise CaptureError(
                f"torch_npu did not record {len(unseen)} of {len(calls)} calls with host values "
                f"({', '.join(sorted(set(unseen)))}) for updates: replays would reuse the lengths of the capture",
                "call hal.ops in the captured function instead of torch.ops.hal, which hides its launches from "
                "torch_npu",
            )
        seen = sum(call.recorded for call in calls)
        if len(records) != seen:
            raise CaptureError(
                f"torch_npu recorded {len(records)} launches to update, but hal's operations made only {seen} of them",
                "call attention through hal.ops.paged_attention, which names the lengths that a replay updates",
            )

    def _update_of(self, record: Any) -> dict[str, Update]:
        """Return the updates of one recorded launch, by key."""
        found = updates_of(record)
        if found is None:
            raise CaptureError(
                f"the driver has no host values for the updatable launch {record.op_cache_entry.__name__}",
                "report it to the driver's maintainers",
            )
        return found

    def _accept(self, host_values: Mapping[str, Tensor]) -> list[dict[str, Any]] | str:
        """Return the update of each recorded launch, or why attention does not support these lengths in a replay."""
        for name, fixed in self._fixed.items():
            if (given := host_values[name].tolist()) != fixed:
                raise HostValueError(
                    f"{name} is {given}, but the graph was captured with {fixed}, which no replay can change",
                    "replay it with one query per sequence, or capture another graph",
                )
        if self._limits and (refusal := self._refusal(host_values["kv_lens_host"].tolist())):
            return refusal
        # Records with the same keys share one update, which torch_npu only reads.
        made: list[dict[str, Any]] = []
        for keys, names in self._distinct:
            own = dict(zip(names, map(host_values.__getitem__, names.values()), strict=True))
            made.append(found := {})
            for key, update in keys.items():
                found[key] = update(own)
        return list(map(made.__getitem__, self._updates))

    def _refusal(self, lens: list[int]) -> str | None:
        return next(filter(None, (limit.refusal(lens) for limit in self._limits)), None)

    def _launch(self, updates: Any) -> None:
        index = self._device.torch.index
        # In another thread, the current device is 0 at first.
        here = torch.accelerator.current_device_index() == index
        with UPDATING:
            if here:
                self._replay_and_update(updates)
            else:
                with torch_npu.npu.device(index):
                    self._replay_and_update(updates)

    def _replay_and_update(self, updates: list[dict[str, Any]]) -> None:
        if self._failures != (failures := self._device.count_failures()):
            failures = self._recover()
        if not updates:
            self._graph.replay()
            return
        mode, current = self._graph.graph_dispatch_mode, self._device.current_stream()
        mode.update_stream = self._device.stream_beside(current)
        self._failures = None  # tells the next replay to recover if anything, such as an interrupt, stops this one
        try:
            self._graph.replay()
            # The previous replay may not have reached its attention yet, and must not read these values.
            mode.update_stream.wait_event(self._replayed)
            self._graph.update(cpu_update_input=updates)
            self._replayed.record(current)
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            raise self._replay_error(error, "host values") from error
        self._failures = failures

    def _replay_error(self, error: Exception, what: str) -> HalError:
        """Return the error of a replay that failed when it set ``what``."""
        known = explain(error)
        if isinstance(known, CommunicationError):
            return known
        return GraphError(
            f"the {what} of a replay could not be set, and its results are invalid: {first_line(error)}",
            "replay again; if it repeats, run the phase with the compiler eager, and report it",
        )

    def _recover(self) -> int:
        """Recover from a failure: release the tasks that still wait, and clear their events for the next replay.

        If another thread failed, the previous replay may still be running correctly. Its events stay unchanged until
        its update is complete.

        Returns:
            The device's number of failures.

        Raises:
            DeviceError: work of this thread failed that it has not waited for yet, such as its last step, and the
                last replay was complete. Nothing else would tell it.
        """
        lost: HalError | None = None
        mode, current = self._graph.graph_dispatch_mode, torch_npu.npu.current_stream()
        records, broke_off = mode.graph_dispatch_records, self._failures is None
        stream = self._device.stream_beside(current, mode.update_stream)
        if broke_off:
            with suppress(RuntimeError):  # closes the task group that a failed update left open
                torch_npu.npu.graph_task_update_end(mode.update_stream)
        # The events are recorded repeatedly: a replay before the failed one may clear an event recorded for the latter.
        behind, updated, until = torch_npu.npu.Event(), torch_npu.npu.Event(), time.monotonic() + RECOVERY_TIMEOUT
        try:
            behind.record(current)
            updated.record(mode.update_stream)
            while not behind.query() and time.monotonic() < until:
                if broke_off or updated.query():
                    for record in records:
                        record.event.record(stream)
                time.sleep(0.001)
        except RuntimeError as error:
            lost = explain(error)
        # Streams instead of the whole device, on which another thread may be capturing.
        used = (current, mode.update_stream, stream)
        for each in used:
            try:
                self._device.wait_for(each)
            except HalError as error:
                lost = error
        for record in records:
            record.event.record(stream)
            record.event.wait(stream)  # clears the event; torch_npu's reset() does so only in a capture
        for each in used:
            self._device.wait_for(each)
        self._replayed = torch_npu.npu.Event()  # waiting for the old event may raise the failure again
        self._failures = failures = self._device.count_failures()
        if lost is not None and not broke_off:  # else the caller raises
            raise lost
        return failures

    def _explain(self, error: Exception) -> HalError | None:
        return explain_in_capture(error)

    def _release_outputs(self) -> None:
        self._kept = None

    def _release(self) -> None:
        graph, self._graph = self._graph, None
        self._kept = None
        self._distinct, self._updates, self._fixed, self._replayed = [], [], {}, None
        if graph is not None:
            graph.reset()
