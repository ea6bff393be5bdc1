"""Decode steps as graphs, one per bucket, sharing one pool."""

from __future__ import annotations

import logging
import math
from functools import partial

import attrs
from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch
from hal.errors import CaptureError
from hal.graph import Graph
from hal.kv_cache import KVCache
from hal.nn import CausalLM
from hal.runtime.buckets import PaddedBatch, bucket_for, capture_sizes

log = logging.getLogger("hal.runtime")


@attrs.frozen
class _Bucket:
    padded: PaddedBatch
    graph: Graph


class GraphDecoder:
    """Captures the model's decode step for each bucket, largest first, and replays the one that fits.

    Raises:
        CaptureError: a bucket could not be captured, and ``on_capture_error`` is ``raise``.
    """

    def __init__(self, model: CausalLM, backend: Backend, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._said = False
        self._buckets: dict[int, _Bucket] = {}
        config = backend.config.compilation
        longest = min(model.max_length, cache.spec.num_tokens)
        max_blocks = math.ceil(longest / cache.spec.block_size)
        pool = None
        for size in reversed(capture_sizes(config)):
            padded = PaddedBatch(size, max_blocks, cache.spec.block_size, backend.device.torch)
            graph = backend.graph()
            try:
                graph.capture(partial(model, padded.batch, cache.layers), pool=pool)
            except CaptureError as error:
                if config.on_capture_error == "raise":
                    raise
                log.warning("decode batches of %d run eagerly: %s", size, error)
                continue
            pool = graph.pool
            self._buckets[size] = _Bucket(padded, graph)
        self._sizes = sorted(self._buckets)
        log.info("captured decode graphs for batch sizes %s", self._sizes)

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
        bucket = self._buckets[size]
        bucket.padded.fill(batch)
        values = bucket.padded.host_values(batch)
        # A model without attention takes none of them.
        bucket.graph.replay(**{name: value for name, value in values.items() if name in bucket.graph.host_values})
        outputs: Tensor = bucket.graph.outputs
        return outputs[: batch.num_sequences]
