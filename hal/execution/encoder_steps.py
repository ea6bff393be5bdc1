"""How an encoder's step runs: its Python, its optimized code, graphs of that code, or Inductor's code."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

import attrs
import torch

from hal.compile.collectives_of_one import collectives_of_one
from hal.compile.optimize import OptimizedStep, kept_whole, optimize
from hal.compile.trace import trace_encoder
from hal.device.graph import Graph
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.drivers.compiler_registry import EAGER
from hal.errors import ConfigError
from hal.nn import Encoder
from hal.step import EncoderBatch
from hal.step.static_encoder_batch import StaticEncoderBatch

EncoderStep = Callable[[EncoderBatch], Outputs]
SIZES = (64, 256, 1024)
"""The default numbers of embeddings to capture."""
OPTIMIZED, GRAPH, INDUCTOR = "optimized", "graph", "inductor"


def encoder_compiler(backend: Backend) -> str:
    """Return how the backend's configuration runs encoders.

    Raises:
        ConfigError: the backend does not support it.
    """
    compilation = backend.config.compilation
    chosen = compilation.encoder.compiler or (EAGER if compilation.compiler == EAGER else OPTIMIZED)
    wants = {GRAPH: backend.graphs, INDUCTOR: backend.inductor is not None}
    if not wants.get(chosen, True):
        raise ConfigError(
            f"compilation.encoder.compiler is {chosen}, which the backend {backend.name} does not support",
            "set it to optimized",
        )
    return chosen


def encoder_sizes(backend: Backend) -> list[int]:
    """Return the numbers of embeddings to capture, ascending."""
    asked, most = backend.config.compilation.encoder.capture_sizes, backend.config.max_prefill_tokens
    return sorted(set(asked or [size for size in SIZES if size <= most] or [most]))


def encoder_step(encoder: Encoder, backend: Backend) -> EncoderStep:
    """Return what runs an encoder's steps, as the configuration says.

    Raises:
        CaptureError: a size cannot be captured.
        CompileError: the encoder cannot be traced or compiled.
        ConfigError: the configuration does not fit the backend.
    """
    chosen = encoder_compiler(backend)
    if chosen == EAGER:
        return eager_encoder(encoder)
    if chosen == INDUCTOR:
        return _compiled(encoder, backend)
    lowered = optimized_encoder(encoder, backend).for_any_size(encoder, backend)
    uncaptured: EncoderStep = lambda batch: lowered(*batch.tensors())  # noqa: E731
    return uncaptured if chosen == OPTIMIZED else CapturedEncoder(encoder, backend, uncaptured)


def eager_encoder(encoder: Encoder) -> EncoderStep:
    """Return what runs an encoder's Python code."""
    return lambda batch: (encoder(batch),)


def optimized_encoder(encoder: Encoder, backend: Backend) -> OptimizedStep:
    """Return an encoder's step for any sizes, rewritten for a backend.

    Raises:
        CompileError: the encoder cannot be traced, or a pass failed.
    """
    passes = backend.config.compilation.of("prefill").passes
    trace = partial(trace_encoder, encoder, whole=kept_whole(backend), decompose=False)
    return optimize(trace, backend, passes)


def _compiled(encoder: Encoder, backend: Backend) -> EncoderStep:
    from hal.compile.inductor_backend import compile_step

    traced = trace_encoder(encoder, whole=backend.inductor or ())
    collectives_of_one(traced.graph)
    traced.check_any_size(encoder)
    run = compile_step(traced)
    return lambda batch: run(batch.tensors())


@attrs.frozen
class _Bucket:
    tokens: int
    static: StaticEncoderBatch
    graph: Graph


class CapturedEncoder:
    """Runs an encoder's steps on graphs of several sizes. What no graph holds runs uncaptured.

    Args:
        encoder: the encoder.
        backend: captures the graphs.
        uncaptured: the step to capture.

    Raises:
        CaptureError: a size cannot be captured.
    """

    def __init__(self, encoder: Encoder, backend: Backend, uncaptured: EncoderStep) -> None:
        self._backend, self._uncaptured = backend, uncaptured
        self._buckets: list[_Bucket] = []
        self.replays = 0
        pool = None
        try:
            for size in reversed(encoder_sizes(backend)):
                tokens = size * encoder.row_tokens
                sequences = max(2, encoder.most_sequences(tokens))
                static = StaticEncoderBatch(encoder.batch_type, tokens, sequences, backend.device.torch)
                graph = backend.graph()
                graph.host_names = static.twins
                with torch.inference_mode():
                    uncaptured(static.batch)  # It may load kernels, which a capture does not allow.
                    graph.capture(partial(uncaptured, static.batch), pool=pool)
                pool = graph.pool
                backend.captured_graphs.add(graph)
                self._buckets.insert(0, _Bucket(tokens, static, graph))
        except BaseException:
            self.close()
            raise

    def __call__(self, batch: EncoderBatch) -> Outputs:
        """Run a step. What it returns is valid until the next one."""
        place = bisect_left(self._buckets, batch.num_tokens, key=lambda each: each.tokens)
        for bucket in self._buckets[place:]:
            if not bucket.static.holds(batch):
                continue
            known = bucket.graph.host_values
            values = {name: each for name, each in bucket.static.host_values(batch).items() if name in known}
            replay = bucket.graph.plan(values)
            if isinstance(replay, str):
                break
            bucket.static.fill(batch)
            outputs: Outputs = replay()
            self.replays += 1
            return outputs
        return self._uncaptured(batch)

    def close(self) -> None:
        """Free the graphs."""
        for bucket in self._buckets:
            self._backend.captured_graphs.discard(bucket.graph)
            bucket.graph.close()
        self._buckets.clear()
