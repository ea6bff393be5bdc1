"""Decode steps as graphs, one per bucket, sharing one pool."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch
from hal.errors import CaptureError, CompileError, DeviceOutOfMemory
from hal.graph import Graph
from hal.kv_cache import KVCache
from hal.nn import CausalLM
from hal.runtime.addresses import Addresses
from hal.runtime.buckets import PaddedBatch, bucket_for, capture_sizes
from hal.runtime.budget import CaptureBudget
from hal.runtime.optimised import OptimisedModel

log = logging.getLogger("hal.runtime")


@attrs.frozen
class _Bucket:
    padded: PaddedBatch
    graph: Graph


class GraphDecoder:
    """Captures the optimised decode step for each bucket, largest first, and replays the one that fits.

    All buckets read their inputs from the memory of the largest's, and share one pool for all else.

    Raises:
        CaptureError: the buckets do not fit the device, or one could not be captured, and ``on_capture_error`` is
            ``raise``.
        CompileError: the model cannot be traced, or a pass failed, and ``on_capture_error`` is ``raise``.
    """

    def __init__(self, model: CausalLM, backend: Backend, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._backend = backend
        self._said = False
        self._buckets: dict[int, _Bucket] = {}
        config = self._config = backend.config.compilation.of("decode")
        self.optimised = OptimisedModel(model, backend, cache, config)
        sizes = capture_sizes(config, backend.limits.capture_sizes, cache.spec.num_blocks - 1)
        longest = min(model.max_length, cache.spec.num_tokens)
        max_blocks = math.ceil(longest / cache.spec.block_size)
        largest = PaddedBatch(sizes[-1], max_blocks, cache.spec.block_size, backend.device.torch)
        try:
            self._capture(largest, sizes, eagerly_after=config.on_capture_error == "eager")
        except (CaptureError, CompileError) as error:  # of the largest, or its budget; those of a size were dealt with
            if config.on_capture_error == "raise":
                raise
            log.warning("decode batches run eagerly: %s", error)
        self._sizes = sorted(self._buckets)
        self._addresses = Addresses(model, cache, largest.batch) if config.debug else None
        log.info("captured decode graphs for batch sizes %s", self._sizes)

    def _capture(self, largest: PaddedBatch, sizes: list[int], *, eagerly_after: bool) -> None:
        backend, pool = self._backend, None
        try:
            with backend.explaining(), torch.inference_mode():
                budget = CaptureBudget.measure(backend, sizes, self._largest_call(largest))
        except DeviceOutOfMemory as error:
            raise CaptureError(f"one decode step of {sizes[-1]} is too much: {error.problem}", error.remedy) from error
        log.info("%s", budget)
        budget.check()
        for size in reversed(sizes):
            padded = largest.first(size)
            try:
                graph = self._captured(padded, pool)
            except (CaptureError, CompileError) as error:
                if not eagerly_after:
                    self._drop()
                    raise
                larger = bucket_for(size, sorted(self._buckets))
                instead = "run eagerly" if larger is None else f"are padded to {larger}"
                log.warning("decode batches of %d %s: %s", size, instead, error)
                continue
            pool = graph.pool
            backend.graphs.add(graph)
            self._buckets[size] = _Bucket(padded, graph)

    def _step_of(self, size: int) -> Callable[..., Tensor]:
        """What is captured for a batch size: the optimised step, or above a limit the model itself."""
        limit = self._config.torch_compile_max_bs
        if limit is not None and size > limit:
            return self._model
        self.optimised.prepare(size)
        return self.optimised

    def _call(self, padded: PaddedBatch) -> Callable[[], Tensor]:
        return partial(self._step_of(padded.batch.num_sequences), padded.batch, self._cache.layers)

    def _captured(self, padded: PaddedBatch, pool: Any) -> Graph:
        """The graph of one batch size. A driver's own compiler makes another here, and has all else."""
        graph = self._backend.graph()
        graph.capture(self._call(padded), pool=pool)
        return graph

    def _largest_call(self, largest: PaddedBatch) -> Callable[[], Tensor]:
        try:
            return self._call(largest)
        except CompileError:
            if self._config.on_capture_error == "raise":
                raise
            return partial(self._model, largest.batch, self._cache.layers)  # and said when its turn comes

    def _drop(self) -> None:
        for bucket in self._buckets.values():
            bucket.graph.reset()
        self._buckets.clear()

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that were captured, ascending."""
        return list(self._sizes)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits ``[sequences, vocab_size]`` at a stable address, valid until the next call."""
        size = bucket_for(batch.num_sequences, self._sizes)
        if size is None:
            if not self._said:
                self._said = True
                log.warning(
                    "a decode batch of %d is above the largest captured size (%s) and runs eagerly",
                    batch.num_sequences,
                    self._sizes[-1] if self._sizes else "none",
                )
            logits: Tensor = self._model(batch, self._cache.layers)
            return logits
        if self._addresses is not None:
            self._addresses.check()
        bucket = self._buckets[size]
        bucket.padded.fill(batch)
        values = bucket.padded.host_values(batch)
        # A model without attention takes none of them.
        bucket.graph.replay(**{name: value for name, value in values.items() if name in bucket.graph.host_values})
        outputs: Tensor = bucket.graph.outputs
        return outputs[: batch.num_sequences]
