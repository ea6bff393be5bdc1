"""The CPU's graph: a tape of all operations of a function, on static memory.

A capture records in two ways. A dispatch mode records each ATen call. An interception of ``hal.ops`` records kernels
that read host values or do not call torch, each as one opaque launch. Both belong to one recorder, which several tapes
of a capture use in turn. A functional ATen call is recorded as its ``out=`` variant, so that a replay writes to the
memory that the capture wrote. A view is not recorded, because its memory does not move. Finally, the memory plan lets
results with disjoint lifetimes share memory.

recorder.py records the function, launch.py is one recorded call and plans the memory, and native_calls.py joins calls
of C++ kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal.device.device import Stream
from hal.device.graph import Graph
from hal.errors import CaptureError, GraphError

from .launch import Launch, Pool, place, storage_of, tensors_of
from .native_calls import replayed
from .recorder import Recorder, recording


class Tape(Graph):
    """A graph that records operations on a tape. It ignores streams; its pool is the memory of its results.

    Args:
        whole: names of the operations whose kernels do not call torch, or read values. They take their results as the
            argument ``out``, unless they write into their arguments.
    """

    def __init__(self, whole: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._whole = whole
        self._launches: list[Launch] = []
        self._calls: list[Callable[[], Any]] = []
        self._recorder: Recorder | None = None

    def dump(self, path: Path) -> None:
        """Write one line for each launch: its name, with the shapes and dtypes of its tensors."""
        self._require_capture("dump")
        path.write_text("".join(f"{launch.line}\n" for launch in self._launches), encoding="utf-8")

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Recorder]:
        return recording(self._whole)

    def _begin(self, context: Recorder, pool: Any) -> None:
        if pool is not None and not isinstance(pool, Pool):
            raise GraphError(f"{pool!r} is not the pool of a tape", "pass the pool of another graph of this backend")
        self._pool = Pool() if pool is None else pool
        self._recorder = context
        context.start(self._launches, self.host_values)

    def _end(self, made: Any) -> tuple[Any, Pool]:
        self._stop()
        pool = self._pool
        self._refuse_made_host_values()
        moved = place(self._launches, made, pool, id(self) if self._holds else None)
        outputs = tree_map_only(Tensor, moved, made)
        for new, old in zip(tensors_of(outputs), tensors_of(made), strict=True):
            if new is not old:
                new.copy_(old)
        for launch in self._launches:
            launch.args, launch.kwargs = tree_map_only(Tensor, moved, (launch.args, launch.kwargs))
            launch.results = [moved(result) for result in launch.results]
        self._calls = replayed(self._launches)
        return outputs, pool

    def _abandon(self) -> None:
        self._stop()

    def _stop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()

    def _refuse_made_host_values(self) -> None:
        """Raise CaptureError for a host value that a launch computes, which would overwrite it in every replay."""
        storages = {storage_of(result) for launch in self._launches for result in launch.results}
        for name, tensor in self.host_values.items():
            if storage_of(tensor) in storages:
                raise CaptureError(
                    f"the host value {name} is computed inside the captured function", "pass the batch's tensor"
                )

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        self.host_values.write(host_values)
        for call in self._calls:
            call()

    def _release_outputs(self) -> None:
        if self._pool is not None:
            self._pool.release_outputs(id(self))

    def _release(self) -> None:
        self._release_outputs()
        self._launches.clear()
        self._calls.clear()
