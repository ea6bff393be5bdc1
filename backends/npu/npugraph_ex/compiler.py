"""The compiler ``npugraph_ex``, which compiles and captures one graph of the whole step for each size."""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch_npu
from torch import Tensor

from hal.compile.lower import lower, source_of
from hal.compile.optimize import OptimizedStep, Stage, optimize_model
from hal.compile.trace import StepSizes
from hal.device.device import Stream
from hal.drivers.compiler import Outputs
from hal.errors import CaptureError, HalError
from hal.execution.capture.capture_sizes import queries_to_capture
from hal.execution.capture.full_graph import FullGraphForm, GraphMaker
from hal.execution.context import FormContext
from hal.execution.state_spec import states_per_sequence
from hal.step import StaticBatch, StepShape

from ..backend import NpuBackend
from ..device import UPDATING, NpuDevice
from ..failures import first_line
from ..graph import NpuGraph
from ..lengths import counts_blocks, packed_lengths
from .compiled_code import CodeCache, Namespace, logging_warnings
from .compiler_options import check_device, check_static_kernels, compiler_options
from .native_nodes import LENGTHS, NativeStep, native_step

log = logging.getLogger("hal.npu")


class CompiledGraph(NpuGraph):
    """A step that npugraph_ex captures in its first run. torch_npu replays it and updates its lengths.

    Args:
        device: the device to capture on.
        names: the namespace of the compiled module.
        arguments: all inputs except the lengths.
    """

    def __init__(self, device: NpuDevice, names: Namespace, arguments: list[Tensor]) -> None:
        super().__init__(device)
        self._names, self._arguments = names, arguments
        self._replay: Any = None
        # The module's namespace and functions form a reference cycle, which would hold memory until it is collected.
        weakref.finalize(self, names.clear).atexit = False

    def first_run(self, lengths: Tensor) -> None:
        """Run the step for the first time, which torch_npu captures.

        Raises:
            CaptureError: the generated code failed for a reason other than an error of CANN's.
        """
        try:
            self.run(lengths.clone(), lengths.tolist())
        except Exception as error:
            if isinstance(error, HalError) or self._explain(error) is not None:
                raise
            raise CaptureError(
                f"the code that npugraph_ex generated fails in its capture: {type(error).__name__}: "
                f"{first_line(error)}",
                'use the compiler "graph", which captures the kernels without npugraph_ex',
            ) from error

    def run(self, lengths: Tensor, integers: list[int]) -> None:
        """Run the step with the length of each sequence, twice: kernels take either."""
        self._names["kernel"](*self._arguments, lengths, *integers)

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Any]:
        return self._compiled_context(stream)

    @contextmanager
    def _compiled_context(self, stream: Stream | None) -> Iterator[Any]:
        with torch_npu.npu.device(self._device.torch):
            before = torch_npu.npu.current_stream()
            try:
                with logging_warnings(), UPDATING:  # torch_npu replays and updates the graph right after its capture
                    yield self._stream(stream)
            finally:
                torch_npu.npu.set_stream(before)  # torch_npu does not restore it if the end of a capture fails

    def _begin(self, context: Any, pool: Any) -> None:
        # Graphs share memory only if they are captured on the same stream into the same pool. torch_npu itself begins
        # and ends the capture, in the module's first run.
        info = self._names["aclgraph_cache_info"]
        info.stream = context
        info.pool = torch_npu.npu.graph_pool_handle() if pool is None else pool
        self._names["acl_graph"].load(info)

    def _end(self, made: Any) -> tuple[Any, Any]:
        info, made = self._names["aclgraph_cache_info"], self._names["acl_graph"]
        (captured,) = made.graphs_meta.values()
        self._graph, self._replay = captured.acl_graph, captured.replay_func
        # NpuGraph._recover releases these tasks after a failure.
        mode = self._graph.graph_dispatch_mode
        mode.graph_dispatch_records = self._replay._updated_node_infos
        packed = [each for each in mode.graph_dispatch_records if counts_blocks(each.updated_func, each)]
        self._limits = list(dict.fromkeys(map(packed_lengths, packed)))
        # Held weakly, as in NpuGraph: their memory belongs to the pool.
        captured.retained_outputs = [torch_npu._C._weak_ref_tensor(each) for each in captured.retained_outputs]
        self._failures = self._device.count_failures()
        return tuple(captured.retained_outputs), info.pool

    def _accept(self, host_values: Mapping[str, Tensor]) -> Any:
        """Return the lengths as a tensor and as integers, or why attention does not support them in a replay."""
        # Cloned for kernels that take a tensor of lengths: torch_npu's queue may read it after the replay returns.
        lengths = host_values[LENGTHS].clone()
        return self._refusal(lens := lengths.tolist()) or (lengths, lens)

    def _launch(self, prepared: Any) -> None:
        with UPDATING, torch_npu.npu.device(self._device.torch):
            if self._failures != (failures := self._device.count_failures()):
                failures = self._recover()
            self._failures = None  # tells the next replay to recover if anything stops this one
            try:
                self.run(*prepared)
            except BaseException as error:
                self._recover()
                if not isinstance(error, Exception):
                    raise
                raise self._replay_error(error, "lengths") from error
            self._failures = failures

    def _recover(self) -> int:
        self._graph.graph_dispatch_mode.update_stream = self._replay._update_stream  # torch_npu may have changed it
        try:
            return super()._recover()
        finally:
            self._replay._event_for_update_replay = torch_npu.npu.Event()  # the old one may raise the failure again

    def _release(self) -> None:
        super()._release()
        self._names.clear()
        self._arguments, self._replay = [], None


def make_form(context: FormContext) -> FullGraphForm:
    """Return the form that runs steps as graphs of torch_npu's compiler.

    Raises:
        ConfigError: an option of the compiler is invalid, or not supported on this machine.
    """
    backend: NpuBackend = context.backend  # type: ignore[assignment]
    check_device(backend.options.device)
    if backend.options.static_kernels:
        check_static_kernels()
    began = time.perf_counter()
    maker = ExGraphs(context, backend)
    form = ExForm(context, maker)
    log.info("npugraph_ex compiled the steps in %.1f s; %d were cached", time.perf_counter() - began, maker.cache_hits)
    return form


class ExForm(FullGraphForm):
    """The form that runs whole steps as graphs of torch_npu's compiler."""

    maker: ExGraphs

    def stages(self, shape: StepShape) -> tuple[Stage, ...]:
        """Return the stages of a captured step for ``hal explain``; none if no bucket serves the shape."""
        bucket = self.bucket_for(shape)
        return () if bucket is None else self.maker.stages(bucket.static)


class ExGraphs(GraphMaker):
    """A graph maker that compiles the optimized step with torch_npu's compiler.

    Attributes:
        optimized: the compiled step of each shape; most shapes share one.
    """

    def __init__(self, context: FormContext, backend: NpuBackend) -> None:
        self._context, self._npu = context, backend
        # torch's pass that computes in place confuses the states of recurrent layers in steps of several tokens.
        several = max(queries_to_capture(context.config)) > 1 and bool(states_per_sequence(context.model))
        self._code = CodeCache(context.config.cache_dir, compiler_options(backend.options, in_place=not several))
        self._lowered: list[tuple[OptimizedStep, Callable[..., Outputs]]] = []
        self.optimized: dict[StepShape, OptimizedStep] = {}

    @property
    def cache_hits(self) -> int:
        """The number of steps read from the cache."""
        return self._code.hits

    def warm_up(self, static: StaticBatch) -> Callable[[], Any]:
        return partial(self._context.eagerly, static.batch, self._context.rows)

    def capture(self, static: StaticBatch, pool: Any) -> CompiledGraph:
        batch = static.batch
        step = self._native(static)
        graph = CompiledGraph(self._npu.npu, self._code.compile(step), step.arguments(batch))
        graph.capture(partial(graph.first_run, batch.kv_lens_host), pool=pool)
        graph.host_values.record(LENGTHS, batch.kv_lens_host, "the step")
        return graph

    def stages(self, static: StaticBatch) -> tuple[Stage, ...]:
        """Return the stages that the optimized step for a batch's shape goes through."""
        began = time.perf_counter()
        step = self._native(static)
        calls = sum(node.op == "call_function" for node in step.graph.graph.nodes)
        native = Stage("native", time.perf_counter() - began, calls, source_of(step.graph.graph))
        began = time.perf_counter()
        code = self._code.generate(step)
        forward = code[code.index("def forward(") : code.index("\ncompile_configs")]
        calls = len(re.findall(r"^\s+\w+ = [\w.]+\(|^\s+\w+ = \w+\[", forward, re.MULTILINE))
        return native, Stage("npugraph_ex", time.perf_counter() - began, calls, code)

    def _native(self, static: StaticBatch) -> NativeStep:
        shape, context = static.shape, self._context
        known = next((each for each in self._lowered if each[0].traced.serves(shape)), None)
        if known is None:
            sizes = StepSizes(shape.sequences, shape.queries)
            step = optimize_model(context.model, context.states, sizes, self._npu, context.config.passes, context.rows)
            step.hoist(self._npu)
            known = step, lower(step.traced.graph.graph)
            self._lowered.append(known)
        step, lowered = known
        self.optimized[shape] = step
        return native_step(lowered, step.traced.fixed, static)
