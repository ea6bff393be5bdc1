"""Decode steps through Inductor: compiled once for one sequence, and once for any larger number of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch
from hal.compile.inductor import compile_step
from hal.compile.trace import batch_tensors, trace_step
from hal.errors import CompileError
from hal.kv_cache import KVCache
from hal.nn import CausalLM
from hal.runtime.buckets import PaddedBatch, capture_sizes

log = logging.getLogger("hal.runtime")

Step = Callable[[list[Tensor]], Tensor]


class CompiledDecoder:
    """Compiles the model's decode step and runs it on batches of any size, unpadded.

    The config's ``capture_sizes`` say which of the two forms are compiled: the one for a single sequence if 1 is among
    them, the one for more if any other is. A single sequence without a form of its own is padded to two.

    Raises:
        CompileError: the model could not be traced or compiled, and ``on_capture_error`` is ``raise``.
    """

    def __init__(self, model: CausalLM, backend: Backend, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        config = backend.config.compilation.of("decode")
        sizes = capture_sizes(config, backend.limits.capture_sizes)
        longest = min(model.max_length, cache.spec.num_tokens)
        max_blocks = math.ceil(longest / cache.spec.block_size)
        self._pair = PaddedBatch(2, max_blocks, cache.spec.block_size, backend.device.torch)
        self._said = False
        self._one: Step | None = None
        self._many: Step | None = None
        try:
            if 1 in sizes:
                self._one = self._compile(1, backend)
            if sizes[-1] > 1:
                self._many = self._compile(sizes[-1], backend)
        except CompileError as error:
            if config.on_capture_error == "raise":
                raise
            log.warning("decode steps run eagerly: %s", error)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits ``[sequences, vocab_size]``, valid until the next call."""
        size = batch.num_sequences
        if size == 1 and self._one is not None:
            return self._one(batch_tensors(batch))
        if self._many is None:
            if not self._said:
                self._said = True
                log.warning("nothing is compiled for a decode batch of %d, which runs eagerly", size)
            logits: Tensor = self._model(batch, self._cache.layers)
            return logits
        if size > 1:
            return self._many(batch_tensors(batch))
        self._pair.fill(batch)
        self._pair.batch.kv_lens_host.copy_(self._pair.host_values(batch)["kv_lens_host"])  # a graph takes them apart
        return self._many(batch_tensors(self._pair.batch))[:1]

    def _compile(self, size: int, backend: Backend) -> Step:
        columns = 2 * size + 3  # sizes that are equal in the example become one in the graph: not rows and columns
        example = PaddedBatch(size, columns, self._cache.spec.block_size, backend.device.torch)
        step = trace_step(
            self._model, example.batch, self._cache.layers, whole=backend.inductor or (), any_size=size > 1
        )
        if size > 1:
            step.demand_any_size(self._model, size)
        log.info("compiling the decode step for %s", "one sequence" if size == 1 else "two or more sequences")
        compiled = compile_step(step)
        if pinned := step.pinned:
            raise CompileError(
                f"the decode step cannot be compiled for other sizes than the example's: it fixes {', '.join(pinned)}",
                "give the operations that it runs kernels of their own, or use the compiler graph",
            )
        return compiled
