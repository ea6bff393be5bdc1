"""hal's Graph on CUDA graphs.

Kernels read lengths on the device, so a replay does not update the graph. It copies host values through pinned memory
to their twins: the device tensors that the captured calls took with them. Each replay has its own pinned memory, so the
caller may change the host values at once. A kernel that plans on the host, such as FlashInfer's attention, plans
before each replay.
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
from hal.device.device import Stream
from hal.device.graph import Graph
from hal.errors import GraphError, HalError, HostValueError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.step.shape import one_query_each

from .failures import explain_in_capture

if TYPE_CHECKING:
    from .flashinfer.plans import GraphPlan

QUERIES = "query_start_loc_host"
_UNENDED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture CUDA could not end. torch's allocator of pinned memory keeps pointers to them."""


class CallWatch:
    """The interception of calls with host values, for all captures in a context.

    Attributes:
        graph: the graph being captured, if any.
    """

    def __init__(self) -> None:
        self.graph: CudaGraph | None = None

    def wrap(self, operation: Operation, kernel: Kernel) -> Kernel:
        """Return a kernel that runs its call through the graph being captured."""
        if not operation.host:
            return kernel

        def watched(*args: Any, **kwargs: Any) -> Any:
            return kernel(*args, **kwargs) if self.graph is None else self.graph.call(operation, kernel, args, kwargs)

        return watched


class CudaGraph(Graph):
    """A CUDA graph. It holds its outputs weakly: their memory belongs to the pool.

    Args:
        index: the device's index.
        capture_stream: the stream for captures that name none, shared by all graphs of a pool.
    """

    def __init__(self, index: int, capture_stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._index, self._capture_stream = index, capture_stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._twins: dict[str, list[Tensor]] = {}
        self._plans: list[GraphPlan] = []
        self._decodes: Tensor | None = None
        self._kept: Any = None
        self._watch: CallWatch | None = None
        self._begun: Any = None  # the pool of the current capture

    def dump(self, path: Path) -> None:
        """Write the graph's nodes to a file in Graphviz's DOT language."""
        self._require_capture("dump")
        assert self._graph is not None
        self._graph.debug_dump(str(path))

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[CallWatch]:
        return self._watching(stream)

    @contextmanager
    def _watching(self, stream: Stream | None) -> Iterator[CallWatch]:
        with torch.cuda.device(self._index):
            on = self._stream(stream)
            self._prepare(on)
            watch = CallWatch()
            with torch.cuda.stream(on), ops.intercepted(watch.wrap):
                yield watch

    def _begin(self, context: CallWatch, pool: Any) -> None:
        if pool is not None and not (isinstance(pool, tuple) and [type(each) for each in pool] == [int, int]):
            raise GraphError(
                f"{pool!r} is not the pool of a CUDA graph", "pass the pool of another graph of this backend"
            )
        # The pool is created here, because torch's graph does not expose the one it creates if the capture fails.
        self._begun = torch.cuda.graph_pool_handle() if pool is None else pool
        self._watch = context
        _clear_cublas()
        # torch.cuda.graph is not used: it enters a stream for each graph, and leaves stream and pool active if the end
        # of a capture fails.
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)  # for dump()
        # In other modes CUDA may refuse to load code during a capture, as Triton does at a kernel's first launch, and
        # the kernels of a size are not known in advance. CUDA still refuses calls that conflict with the capture, such
        # as a wait. Other threads may copy and allocate.
        try:
            self._graph.capture_begin(pool=self._begun, capture_error_mode="relaxed")
        except Exception:  # excludes an interrupt, which may arrive after the capture has begun
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
        """End the capture, if one was begun."""
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
        """Load cuBLAS, which it cannot do during a capture."""
        # The captured function itself is not run in advance: a capture calls it exactly once.
        with torch.cuda.stream(on):
            one = torch.ones(8, 8, dtype=torch.float16, device="cuda")
            one @ one
        torch.cuda.synchronize()
        del one
        _clear_cublas()
        torch.cuda.empty_cache()  # the graph's pool cannot use memory cached in other pools

    def _end_capture(self, pool: Any) -> None:
        assert self._graph is not None
        try:
            self._graph.capture_end()
        except RuntimeError:
            # torch leaves both allocators in capture mode. The device allocator is reset here; otherwise every later
            # release of memory would fail. The allocator of pinned memory cannot be reset, and keeps using the graph.
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
        """Record an operation's host values, and run its kernel for graphs."""
        arguments = operation.arguments(args, kwargs)
        self._record(operation, arguments)
        plan = self._plan(kernel, arguments) if getattr(kernel, "in_graphs", False) else None
        if plan is not None:
            return plan.run(arguments)
        return getattr(kernel, "captured", kernel)(*args, **kwargs)

    def _plan(self, kernel: Any, arguments: Mapping[str, Any]) -> GraphPlan | None:
        """Return an existing or new plan for a call; None if the kernel makes none."""
        known = next((each for each in self._plans if each.serves(arguments)), None)
        if known is not None:
            return known

        def make() -> GraphPlan | None:
            with torch.cuda.device(self._index), torch.inference_mode():
                made: GraphPlan | None = kernel.for_graph(arguments)
                torch.cuda.current_stream().synchronize()
                return made

        # Planning copies and allocates, which is not allowed on the capturing thread.
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(make).result()
        self._plans += [] if made is None else [made]
        return made

    def _record(self, operation: Operation, arguments: Mapping[str, Any]) -> None:
        for name in operation.host:
            replayed = self.host_values.record(name, arguments[name], operation.name)
            twin, twins = arguments.get(name.removesuffix("_host")), self._twins.setdefault(replayed, [])
            if isinstance(twin, Tensor) and twin.is_cuda and all(each.data_ptr() != twin.data_ptr() for each in twins):
                twins.append(twin)
        starts, tokens = arguments.get(QUERIES), next(iter(arguments.values()))  # the queries, or the rows of others
        if starts is not None and one_query_each(tokens.shape[0], starts.tolist()):
            self._decodes = starts.clone()

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        if self._decodes is not None and not torch.equal(host_values[QUERIES], self._decodes):
            raise HostValueError(
                f"{QUERIES} is {host_values[QUERIES].tolist()}, but the graph was captured with "
                f"{self._decodes.tolist()}, which no replay can change",
                "replay it with one query per sequence, or capture another graph",
            )
        if torch.cuda.current_device() == self._index:
            self._start(host_values)
        else:  # for example in another thread, whose current device is 0 at first
            with torch.cuda.device(self._index):
                self._start(host_values)

    def _start(self, host_values: Mapping[str, Tensor]) -> None:
        assert self._graph is not None
        for plan in self._plans:
            plan.update(host_values)
        for name, twins in self._twins.items():
            if not twins or (name == QUERIES and self._decodes is not None):  # unchanged
                continue
            # torch reuses pinned memory only after the copies from it have finished.
            value = host_values[name]
            staged = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
            for twin in twins:
                twin.copy_(staged, non_blocking=True)
        self._graph.replay()

    def _explain(self, error: Exception) -> HalError | None:
        return explain_in_capture(error)

    def _release_outputs(self) -> None:
        self._kept = None

    def _release(self) -> None:
        graph, self._graph = self._graph, None
        self._kept = self._decodes = None
        self._twins, self._plans = {}, []
        if graph is not None:
            graph.reset()


def _clear_cublas() -> None:
    """Release cuBLAS's workspaces, so that torch allocates new ones at the next matrix product.

    Called before a capture, so that the graph's workspace is in its pool, and after it, so that no other is. torch
    frees workspaces outside the pool when Inductor captures a graph; a replay would then write to memory of others.
    """
    torch._C._cuda_clearCublasWorkspaces()


def weakly(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that does not keep it alive."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, nbytes_spanned(tensor))
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


def nbytes_spanned(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
