"""The compiler ``npugraph_ex``: whole steps by torch_npu's own, one compiled and captured graph for each size."""

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
from hal.compile.optimise import OptimisedStep, Stage, optimise_model
from hal.compile.trace import StepSizes
from hal.device.host_values import HostValue
from hal.device.stream import Stream
from hal.errors import CaptureError, GraphError, HalError
from hal.execution.capture.full_graph import FullGraphForm, GraphMaker
from hal.execution.context import FormContext
from hal.step import StaticBatch, StepShape

from ..backend import NpuBackend
from ..device import NpuDevice
from ..failures import first_line
from ..graph import UPDATING, NpuGraph
from ..lengths import PackedLengths, counts_blocks, packed_lengths
from .compiled_code import CodeCache, Namespace, repeating_warnings
from .compiler_options import check_device, check_static_kernels, compiler_options
from .native_nodes import LENGTHS, NativeStep, native_step

log = logging.getLogger("hal.npu")


class CompiledGraph(NpuGraph):
    """A step as npugraph_ex captures it, in its first run. torch_npu replays it and updates the lengths beside.

    Args:
        device: that captures.
        names: of the compiled module.
        arguments: all inputs but the lengths.
    """

    def __init__(self, device: NpuDevice, names: Namespace, arguments: list[Tensor]) -> None:
        super().__init__(device)
        self._names, self._arguments = names, arguments
        self._replay: Any = None
        self._checks: list[PackedLengths] = []
        # The module's functions and its names refer to each other, and would keep memory until the next collection.
        weakref.finalize(self, names.clear).atexit = False

    def first_run(self, lengths: Tensor) -> None:
        """The run that torch_npu captures.

        Raises:
            CaptureError: torch_npu's code failed, otherwise than by an error of CANN's.
        """
        try:
            self.run(lengths)
        except Exception as error:
            if isinstance(error, HalError) or self._explain(error) is not None:
                raise
            raise CaptureError(
                f"the code that npugraph_ex made fails in its capture: {type(error).__name__}: {first_line(error)}",
                'use the compiler "graph", which captures kernels as they are',
            ) from error

    def run(self, lengths: Tensor) -> None:
        """Run with the lengths of each sequence."""
        # Copied, for kernels that take them as a tensor: torch_npu's queue may read it later.
        self._names["kernel"](*self._arguments, lengths.clone(), *lengths.tolist())

    def _capture_context(self, stream: Stream | None) -> AbstractContextManager[Any]:
        return self._compiled_context(stream)

    @contextmanager
    def _compiled_context(self, stream: Stream | None) -> Iterator[Any]:
        with torch_npu.npu.device(self._device.torch):
            before = torch_npu.npu.current_stream()
            try:
                with repeating_warnings(), UPDATING:  # torch_npu replays what it has captured, and updates it
                    yield self._stream(stream)
            finally:
                torch_npu.npu.set_stream(before)  # torch_npu leaves its own behind if the end of a capture fails

    def _begin(self, context: Any, pool: Any) -> None:
        # One stream and one pool for all, as memory is shared by what is captured on the same of both. torch_npu itself
        # begins the capture, in the module's first run, and ends it.
        info = self._names["aclgraph_cache_info"]
        info.stream = context
        info.pool = torch_npu.npu.graph_pool_handle() if pool is None else pool
        self._names["acl_graph"].load(info)

    def _end(self, made: Any) -> tuple[Any, Any]:
        info, made = self._names["aclgraph_cache_info"], self._names["acl_graph"]
        (captured,) = made.graphs_meta.values()
        self._graph, self._replay = captured.acl_graph, captured.replay_func
        # What is let go on after a failure.
        mode = self._graph.graph_dispatch_mode
        mode.graph_dispatch_records = self._replay._updated_node_infos
        packed = [each for each in mode.graph_dispatch_records if counts_blocks(each.updated_func, each)]
        self._checks = list(dict.fromkeys(map(packed_lengths, packed)))
        self.may_refuse = bool(self._checks)
        # Held weakly, as by NpuGraph: their memory is the pool's.
        captured.retained_outputs = [torch_npu._C._weak_ref_tensor(each) for each in captured.retained_outputs]
        self._failures = self._device.count_failures()
        return captured.retained_outputs[0], info.pool

    def refusal(self, host_values: Mapping[str, HostValue]) -> str | None:
        """As for any NPU graph: lengths that attention was not captured for."""
        return next(filter(None, (check.refusal(host_values) for check in self._checks)), None)

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        for check in self._checks:
            check(host_values)
        with UPDATING, torch_npu.npu.device(self._device.torch):
            if self._failures != (failures := self._device.count_failures()):
                failures = self._recover()
            self._failures = None  # whatever breaks this off, the next replay sees it
            try:
                self.run(host_values[LENGTHS])
            except BaseException as error:
                self._recover()
                if not isinstance(error, Exception):
                    raise
                raise GraphError(
                    f"the lengths of a replay could not be set, and its results are void: {first_line(error)}",
                    "replay again; if it repeats, run the phase with the compiler eager, and report it",
                ) from error
            self._failures = failures

    def _recover(self) -> int:
        self._graph.graph_dispatch_mode.update_stream = self._replay._update_stream  # torch_npu may have taken another
        failures = super()._recover()
        self._replay._event_for_update_replay = torch_npu.npu.Event()  # which may hand the failure on
        return failures

    def _release(self) -> None:
        super()._release()
        self._names.clear()
        self._arguments, self._replay = [], None


def make_form(context: FormContext) -> FullGraphForm:
    """Make the form that runs steps by graphs of torch_npu's compiler.

    Raises:
        ConfigError: an option of the compiler is wrong, or cannot be had here.
    """
    backend: NpuBackend = context.backend  # type: ignore[assignment]
    check_device(backend.options.device)
    if backend.options.static_kernels:
        check_static_kernels()
    began = time.perf_counter()
    maker = ExGraphs(context, backend)
    form = ExForm(context, maker)
    log.info("npugraph_ex compiled them in %.1f s; %d were in the cache", time.perf_counter() - began, maker.taken)
    return form


class ExForm(FullGraphForm):
    """Whole steps by graphs of torch_npu's compiler."""

    maker: ExGraphs

    def stages(self, shape: StepShape) -> tuple[Stage, ...]:
        """What became of the optimised step for a shape that was captured, for ``hal explain``."""
        bucket = self.bucket_for(shape)
        return () if bucket is None else self.maker.stages(bucket.static)


class ExGraphs(GraphMaker):
    """Has torch_npu's compiler make a graph of the optimised step.

    Attributes:
        optimised: by shape, the step that was compiled for it; most shapes share one.
    """

    def __init__(self, context: FormContext, backend: NpuBackend) -> None:
        self._context, self._npu = context, backend
        self._code = CodeCache(context.config.cache_dir, compiler_options(backend.options))
        self._lowered: list[tuple[OptimisedStep, Callable[..., tuple[Tensor]]]] = []
        self.optimised: dict[StepShape, OptimisedStep] = {}

    @property
    def taken(self) -> int:
        """How many were compiled by an earlier process."""
        return self._code.taken

    def walk(self, static: StaticBatch) -> Callable[[], Any]:
        return partial(self._context.eagerly, static.batch)  # as the optimised step stays as it is

    def capture(self, static: StaticBatch, pool: Any) -> CompiledGraph:
        batch = static.batch
        step = self._native(static)
        graph = CompiledGraph(self._npu.npu, self._code.compile(step), step.arguments(batch))
        graph.capture(partial(graph.first_run, batch.kv_lens_host), pool=pool)
        graph.host_values.record(LENGTHS, batch.kv_lens_host, "the step")
        return graph

    def stages(self, static: StaticBatch) -> tuple[Stage, ...]:
        """What became of the optimised step of a batch's shape."""
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
            step = optimise_model(context.model, context.states, sizes, self._npu, context.config.passes)
            step.hoist(self._npu)
            known = step, lower(step.traced.graph.graph)
            self._lowered.append(known)
        step, lowered = known
        self.optimised[shape] = step
        return native_step(lowered, step.traced.fixed, static)
