"""The CPU's graph: a tape of every operation that a function performed, on fixed memory.

Capture watches the function from two sides. A dispatch mode sees every ATen call, the model's glue included; an
interception of ``hal.ops`` sees the kernels that read host values or work outside torch, which go on the tape whole.
Both belong to one recorder, which is entered once and told on which tape to record, if any. A functional ATen call is
recorded as its ``out=`` variant, so that a replay writes where the capture wrote; a view is not recorded, for the
memory under it does not move. Then the memory plan lets results that are never alive together share it.

launch.py is one recorded call, recorder.py watches the function, replay_plan.py plans the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal.device.graph import Graph
from hal.device.stream import Stream
from hal.errors import CaptureError, GraphError

from .launch import Launch, storage_of, tensors_of
from .recorder import Recorder, recording
from .replay_plan import Pool, place


class Tape(Graph):
    """See the module. Streams mean nothing here; the pool is the memory that results live in.

    Args:
        whole: names of the operations whose kernels the dispatcher does not see; these take their results' places as
            the argument ``out``, unless they write into their arguments.
    """

    def __init__(self, whole: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._whole = whole
        self._launches: list[Launch] = []
        self._calls: list[Callable[[], Any]] = []
        self._recorder: Recorder | None = None

    def dump(self, path: Path) -> None:
        """One line a launch: its name, and the shapes and dtypes of its tensors."""
        self._require_capture("dump")
        path.write_text("".join(f"{launch.line}\n" for launch in self._launches), encoding="utf-8")

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Recorder]:
        return recording(self._whole)

    def _begin(self, context: Recorder, pool: Any) -> None:
        if pool is not None and not isinstance(pool, Pool):
            raise GraphError(f"{pool!r} is not the pool of a tape", "pass the pool of another graph of this backend")
        self._pool = Pool() if pool is None else pool
        self._recorder = context
        context.record_on(self._launches, self.host_values)

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
        self._calls = [launch.replayable() for launch in self._launches]
        return outputs, pool

    def _abandon(self) -> None:
        self._stop()

    def _stop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()

    def _refuse_made_host_values(self) -> None:
        """A host value that a launch made would be overwritten by it at every replay, new lengths and all."""
        storages = {storage_of(result) for launch in self._launches for result in launch.results}
        for name, tensor in self.host_values.items():
            if storage_of(tensor) in storages:
                raise CaptureError(
                    f"the host value {name} was computed inside the captured function", "pass the batch's own tensor"
                )

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        self.host_values.write(host_values)
        for call in self._calls:
            call()

    def _let_go(self) -> None:
        if self._pool is not None:
            self._pool.let_go(id(self))

    def _release(self) -> None:
        self._let_go()
        self._launches.clear()
        self._calls.clear()
