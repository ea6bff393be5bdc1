"""The compiler ``npugraph_ex``: decode steps by torch_npu's own, one compiled and captured graph per batch size."""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch_npu
from torch import Tensor

from hal.batch import Batch
from hal.compile.lower import lower, source_of
from hal.compile.optimise import OptimisedStep, Stage, optimise_model
from hal.compile.trace import example_batch
from hal.errors import GraphError, HalError
from hal.kv_cache import KVCache
from hal.nn import CausalLM
from hal.runtime.buckets import PaddedBatch
from hal.runtime.decode import GraphDecoder
from hal.stream import Stream

from .compiled_code import CodeCache, Namespace, repeating_warnings
from .ex_options import check_device, check_static_kernels, compiler_options
from .failures import first_line
from .graph import NpuGraph, capture_error
from .lengths import PackedLengths, packed_lengths
from .native import LENGTHS, NativeStep, native_step

if TYPE_CHECKING:
    from .driver import NpuBackend

log = logging.getLogger("hal.npu")


class CompiledGraph(NpuGraph):
    """A step as npugraph_ex captures it, in its first run. torch_npu replays it and updates the lengths beside.

    Args:
        backend: that captures.
        names: of the compiled module.
        arguments: all inputs but the lengths.
    """

    def __init__(self, backend: NpuBackend, names: Namespace, arguments: list[Tensor]) -> None:
        super().__init__(backend)
        self._names, self._arguments = names, arguments
        self._replay: Any = None
        self._checks: list[PackedLengths] = []
        # The module's functions and its names refer to each other, and would keep memory until the next collection.
        weakref.finalize(self, names.clear).atexit = False

    def run(self, lengths: Tensor) -> None:
        """Run with the lengths of each sequence."""
        # Copied, for kernels that take them as a tensor: torch_npu's queue may read it later.
        self._names["kernel"](*self._arguments, lengths.clone(), *lengths.tolist())

    def _capture(self, fn: Callable[[], Any], pool: Any, stream: Stream | None) -> tuple[Any, Any]:
        # One stream and one pool for all, as memory is shared by what is captured on the same of both.
        info, made = self._names["aclgraph_cache_info"], self._names["acl_graph"]
        info.stream = self._stream(stream)
        info.pool = torch_npu.npu.graph_pool_handle() if pool is None else pool
        made.load(info)
        with torch_npu.npu.device(self._backend.device.torch):
            before = torch_npu.npu.current_stream()
            try:
                with repeating_warnings():
                    fn()
            except HalError:
                raise
            except Exception as error:
                raise capture_error(error) from error
            finally:
                torch_npu.npu.set_stream(before)  # torch_npu leaves its own behind if the end of a capture fails
        (captured,) = made.graphs_meta.values()
        self._graph, self._replay = captured.acl_graph, captured.replay_func
        # What is let go on after a failure.
        mode = self._graph.graph_dispatch_mode
        mode.update_stream, mode.graph_dispatch_records = self._replay._update_stream, self._replay._updated_node_infos
        packed = [each for each in mode.graph_dispatch_records if each.kwargs.get("input_layout") == "TND"]
        self._checks = list(dict.fromkeys(map(packed_lengths, packed)))
        # Held weakly, as by NpuGraph: their memory is the pool's.
        captured.retained_outputs = [torch_npu._C._weak_ref_tensor(each) for each in captured.retained_outputs]
        self._failures = self._backend.npu.count_failures()
        return captured.retained_outputs[0], info.pool

    def _launch(self, host_values: Mapping[str, Tensor]) -> None:
        for check in self._checks:
            check(host_values)
        with torch_npu.npu.device(self._backend.device.torch):
            if self._failures != (failures := self._backend.npu.count_failures()):
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
        failures = super()._recover()
        self._replay._event_for_update_replay = torch_npu.npu.Event()  # which may hand the failure on
        return failures

    def _release(self) -> None:
        super()._release()
        self._names.clear()
        self._arguments, self._replay = [], None


class ExDecoder(GraphDecoder):
    """Decode steps by graphs that torch_npu's compiler makes of the optimised step. Otherwise as its base.

    Attributes:
        optimised_steps: by batch size, the step that was compiled for it; most sizes share one.

    Raises:
        ConfigError: an option of the compiler is wrong, or cannot be had here.
    """

    def __init__(self, model: CausalLM, backend: NpuBackend, cache: KVCache) -> None:
        check_device(backend.options.device)
        if backend.options.static_kernels:
            check_static_kernels()
        self._npu = backend
        self._code = CodeCache(backend.config.compilation.of("decode").cache_dir, compiler_options(backend.options))
        self._lowered: list[tuple[OptimisedStep, Callable[..., tuple[Tensor]]]] = []
        self.optimised_steps: dict[int, OptimisedStep] = {}
        began = time.perf_counter()
        super().__init__(model, backend, cache)
        seconds, taken = time.perf_counter() - began, self._code.taken
        log.info("npugraph_ex compiled them in %.1f s; %d were in the cache", seconds, taken)

    def _captured(self, padded: PaddedBatch, pool: Any) -> CompiledGraph:
        batch = padded.batch
        step = self._native(batch)
        graph = CompiledGraph(self._npu, self._code.compile(step), step.arguments(batch))
        graph.capture(partial(graph.run, batch.kv_lens_host), pool=pool)
        graph.host_values.record(LENGTHS, batch.kv_lens_host, "the step")
        return graph

    def stages(self, size: int) -> tuple[Stage, ...]:
        """What became of the optimised step for a batch size that was captured, for ``hal explain``."""
        began = time.perf_counter()
        step = self._native(self._buckets[size].padded.batch)
        calls = sum(node.op == "call_function" for node in step.graph.graph.nodes)
        native = Stage("native", time.perf_counter() - began, calls, source_of(step.graph.graph))
        began = time.perf_counter()
        code = self._code.generate(step)
        forward = code[code.index("def forward(") : code.index("\ncompile_configs")]
        calls = len(re.findall(r"^\s+\w+ = [\w.]+\(|^\s+\w+ = \w+\[", forward, re.MULTILINE))
        return native, Stage("npugraph_ex", time.perf_counter() - began, calls, code)

    def _largest_call(self, largest: PaddedBatch) -> Callable[[], Tensor]:
        return partial(self._model, largest.batch, self._cache.layers)  # as the optimised step stays as it is

    def _native(self, batch: Batch) -> NativeStep:
        size = batch.num_sequences
        example = example_batch(size, size, size, columns=2 * size + 3, device=self._npu.device.torch)
        known = next((each for each in self._lowered if each[0].traced.serves(example)), None)
        if known is None:
            passes = self._config.passes
            step = optimise_model(self._model, example, self._cache.layers, self._npu, passes, any_size=size > 1)
            step.hoist(self._npu)
            known = step, lower(step.traced.graph.graph)
            self._lowered.append(known)
        self.optimised_steps[size] = known[0]
        return native_step(known[1], known[0].traced.fixed, batch)
