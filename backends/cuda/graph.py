"""CUDA graphs behind hal's Graph.

Kernels read lengths on the device, so a replay has nothing to update in the graph. Its host values are copied to the
tensors on the device that the captured calls were given beside them, through pinned memory of their own, so that the
caller may change them at once and no replay meets lengths that are not its own. A kernel that plans on the host
(FlashInfer's attention) plans anew before each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal import ops
from hal.device.graph import Graph
from hal.device.stream import Stream
from hal.errors import GraphError, HalError, HostValueError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.step.batch import one_query_each

from .failures import explain_in_capture

if TYPE_CHECKING:
    from .flashinfer.plans import GraphPlan

QUERIES = "query_start_loc_host"
_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose captures CUDA could not end: torch's allocator of pinned memory points to them for good."""


class Watch:
    """The interception of calls with host values, for all captures of a block.

    Attributes:
        graph: whose capture is under way, if one is.
    """

    def __init__(self) -> None:
        self.graph: CudaGraph | None = None

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """For :func:`hal.ops.intercepted`."""
        if not operation.host:
            return kernel

        def watched(*args: Any, **kwargs: Any) -> Any:
            return kernel(*args, **kwargs) if self.graph is None else self.graph.call(operation, kernel, args, kwargs)

        return watched


class CudaGraph(Graph):
    """See the module. Its outputs are held weakly: their memory is the pool's, which later captures use too.

    Args:
        index: the device's.
        capture_stream: where it captures, unless the caller gives a stream. One for all graphs that share a pool.
    """

    def __init__(self, index: int, capture_stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._index, self._capture_stream = index, capture_stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._twins: dict[str, list[Tensor]] = {}
        self._plans: list[GraphPlan] = []
        self._decodes: Tensor | None = None
        self._kept: Any = None
        self._watch: Watch | None = None
        self._begun: Any = None  # the pool of the capture that is under way

    def dump(self, path: Path) -> None:
        """Write CUDA's listing of the graph's nodes, in Graphviz's language."""
        self._require_capture("dump")
        assert self._graph is not None
        self._graph.debug_dump(str(path))

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Watch]:
        return self._watching(stream)

    @contextmanager
    def _watching(self, stream: Stream | None) -> Iterator[Watch]:
        with torch.cuda.device(self._index):
            on = self._stream(stream)
            self._prepare(on)
            watch = Watch()
            with torch.cuda.stream(on), ops.intercepted(watch.wrap):
                yield watch

    def _begin(self, context: Watch, pool: Any) -> None:
        if pool is not None and not (isinstance(pool, tuple) and [type(each) for each in pool] == [int, int]):
            raise GraphError(
                f"{pool!r} is not the pool of a CUDA graph", "pass the pool of another graph of this backend"
            )
        # Always one that is known here: if a capture breaks, torch's graph does not tell the one that it made.
        self._begun = torch.cuda.graph_pool_handle() if pool is None else pool
        self._watch = context
        _clear_cublas()
        # Not torch.cuda.graph, which enters a stream for each graph and leaves it and its pool behind if the end of a
        # capture fails.
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # for dump()
        # In any other mode CUDA may refuse to load code in a capture, as Triton does at a kernel's first launch: which
        # kernels a size takes is known only then. What conflicts with the capture itself, such as a wait, it refuses in
        # this mode too. Other threads may copy and allocate meanwhile.
        try:
            self._graph.capture_begin(pool=self._begun, capture_error_mode="relaxed")
        except Exception:  # an interrupt may come right behind the call
            self._begun = None
            raise
        context.graph = self

    def _end(self, made: Any) -> tuple[Any, Any]:
        pool = self._begun
        self._stop()
        assert self._graph is not None
        self._graph.instantiate()
        self._kept = made if self._holds else None
        return tree_map_only(Tensor, lambda each: weakly(each) if each.is_cuda else each, made), pool

    def _abandon(self) -> None:
        self._stop()

    def _stop(self) -> None:
        """End the capture that was begun."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.graph = None
        try:
            if self._begun is not None:
                self._end_capture(self._begun)
        except Exception:
            self._begun = None
            raise
        finally:
            _clear_cublas()
        self._begun = None

    def _prepare(self, on: torch.cuda.Stream) -> None:
        """Have cuBLAS load itself, which it may not do in a capture."""
        # The function is not tried out: a capture calls it once, and it may go on from where the call before it ended.
        with torch.cuda.stream(on):
            one = torch.ones(8, 8, dtype=torch.float16, device="cuda")
            one @ one
        torch.cuda.synchronize()
        del one
        _clear_cublas()
        torch.cuda.empty_cache()  # the graph's pool cannot use what is left over in others

    def _end_capture(self, pool: Any) -> None:
        assert self._graph is not None
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch leaves both allocators in the capture then. That of the device is told, as every later release of
            # memory would fail; that of pinned memory cannot be, and goes on asking the graph whether it captures.
            _UNENDED.append(self._graph)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._index, pool)
                torch._C._cuda_releasePool(self._index, pool)
            raise

    def _stream(self, stream: Stream | None) -> torch.cuda.Stream:
        if stream is None:
            return self._capture_stream
        given = stream.torch
        return torch.cuda.Stream(
            stream_id=given.stream_id, device_index=given.device_index, device_type=given.device_type
        )

    def call(self, operation: Operation, kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the names of an operation's host values, and run its kernel for graphs."""
        arguments = operation.arguments(args, kwargs)
        self._note(operation, arguments)
        plan = self._plan(kernel, arguments) if getattr(kernel, "in_graphs", False) else None
        if plan is not None:
            return plan.run(arguments)
        return getattr(kernel, "captured", kernel)(*args, **kwargs)

    def _plan(self, kernel: Any, arguments: Mapping[str, Any]) -> GraphPlan | None:
        """The kernel's plan for a call: one that serves it already, or a new one, or None if it makes none."""
        known = next((each for each in self._plans if each.serves(arguments)), None)
        if known is not None:
            return known

        def make() -> GraphPlan | None:
            with torch.cuda.device(self._index), torch.inference_mode():
                made: GraphPlan | None = kernel.for_graph(arguments)
                torch.cuda.current_stream().synchronize()
                return made

        # It copies and allocates, which the thread that captures may not do, and others may.
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(make).result()
        self._plans += [] if made is None else [made]
        return made

    def _note(self, operation: Operation, arguments: Mapping[str, Any]) -> None:
        for name in operation.host:
            self.host_values.record(name, arguments[name], operation.name)
            twin, twins = arguments.get(name.removesuffix("_host")), self._twins.setdefault(name, [])
            if isinstance(twin, Tensor) and twin.is_cuda and all(each.data_ptr() != twin.data_ptr() for each in twins):
                twins.append(twin)
        starts = arguments.get(QUERIES)
        if starts is not None and one_query_each(arguments["query"].shape[0], starts.tolist()):
            self._decodes = starts.clone()

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        if self._decodes is not None and not torch.equal(host_values[QUERIES], self._decodes):
            raise HostValueError(
                f"the graph was captured with {QUERIES} {self._decodes.tolist()}, which no replay can change",
                "replay it for one query a sequence, or capture another graph",
            )
        if torch.cuda.current_device() == self._index:
            self._start(host_values)
        else:  # of another thread, say, which begins with device 0
            with torch.cuda.device(self._index):
                self._start(host_values)

    def _start(self, host_values: Mapping[str, Tensor]) -> None:
        assert self._graph is not None
        for plan in self._plans:
            plan.update(host_values)
        for name, twins in self._twins.items():
            if not twins or (name == QUERIES and self._decodes is not None):  # it is as it was
                continue
            # torch gives pinned memory out again only when the copies from it are done.
            value = host_values[name]
            staged = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
            for twin in twins:
                twin.copy_(staged, non_blocking=True)
        self._graph.replay()

    def _explain(self, error: Exception) -> HalError | None:
        return explain_in_capture(error)

    def _let_go(self) -> None:
        self._kept = None

    def _release(self) -> None:
        graph, self._graph = self._graph, None
        self._kept = self._decodes = None
        self._twins, self._plans = {}, []
        if graph is not None:
            graph.reset()


def _clear_cublas() -> None:
    """Have torch take memory for cuBLAS's partial sums anew, at the next product of matrices.

    Before a capture, so that the graph's is in its pool; and after it, so that nothing else's is. What torch has
    outside of the pool it gives back whenever Inductor captures a graph, and then ours would write to memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()


def weakly(tensor: Tensor) -> Tensor:
    """The same memory as another tensor, without holding it."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, reach(tensor))
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage,
        0,
        tensor.shape,
        tensor.stride(),
    )


def reach(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
