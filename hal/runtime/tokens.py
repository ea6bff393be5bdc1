"""Steps that are captured for numbers of tokens, not for whole batches: what all ways to do so have in common.

Their graphs read and write fixed memory with a row for each token of their bucket. What cannot be captured runs between
the graphs, on the rows that a batch fills and on its own lengths and block tables; so one set of graphs serves steps of
any shape.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch
from hal.compile.trace import example_batch
from hal.errors import CaptureError, CompileError, DeviceOutOfMemory
from hal.graph import Graph
from hal.kv_cache import DUMMY_BLOCK, KVCache
from hal.nn import CausalLM
from hal.runtime.addresses import Addresses
from hal.runtime.buckets import bucket_for, capture_sizes
from hal.runtime.budget import CaptureBudget

log = logging.getLogger("hal.runtime")

BY_TOKEN = ("token_ids", "positions", "slot_mapping")
FIELDS = tuple(each.name for each in attrs.fields(Batch))
SMALLEST, LARGEST = 16, 1024
"""Of the token counts that prefill is captured for, where the config says nothing: they double."""


class TokenBucket:
    """Graphs for a number of tokens, and where they read a batch.

    Args:
        fixed: the batch of the largest bucket, whose first rows all buckets read.
        size: tokens.
        block_size: of the cache.

    Attributes:
        graphs: in the order in which they run.
        parts: of the step, as the kind of step needs it.
    """

    def __init__(self, fixed: Batch, size: int, block_size: int) -> None:
        self.size, self._fixed = size, fixed
        self.graphs: list[Graph] = []
        self.parts: list[Any] = []
        self._dummies = dummy_slots(size, block_size, fixed.slot_mapping.device)

    def fill(self, batch: Batch) -> None:
        """Copy the batch's rows in. The rows after them keep old tokens, and write to no sequence's blocks."""
        tokens = batch.num_tokens
        for name in BY_TOKEN:
            getattr(self._fixed, name)[:tokens] = getattr(batch, name)
        if tokens < self.size:
            self._fixed.slot_mapping[tokens : self.size] = self._dummies[tokens:]

    def drop(self) -> None:
        """Let go of all graphs."""
        for graph in self.graphs:
            graph.reset()
        self.graphs.clear()
        self.parts.clear()


class TokenStep(ABC):
    """Runs a model's steps by graphs for numbers of tokens, and eagerly above the largest.

    Attributes:
        sizes: the token counts that were captured, ascending.
        num_pieces: graphs of each bucket.

    Raises:
        CaptureError: a graph could not be captured, or the device has no room for all, and ``on_capture_error`` is
            ``raise``.
        CompileError: the model cannot be traced or a pass failed, and ``on_capture_error`` is ``raise``.
        ConfigError: the splitting operations do not suit the model.
    """

    what: ClassVar[str] = "pieces"
    num_pieces: int = 0

    def __init__(self, model: CausalLM, backend: Backend, cache: KVCache, phase: Literal["decode", "prefill"]) -> None:
        self._model, self._backend, self._cache, self._phase = model, backend, cache, phase
        self._config = backend.config.compilation.of(phase)
        self._said = False
        self._buckets: dict[int, TokenBucket] = {}
        self.sizes: list[int] = []
        sizes = self._wanted_sizes()
        self._fixed = self._inputs(sizes[-1])
        try:
            with backend.explaining():
                self._prepare(sizes[-1])
            self._capture(sizes)
        except (CaptureError, CompileError) as error:
            if self._config.on_capture_error == "raise":
                raise
            log.warning("%s batches run eagerly: %s", phase, error)
        self.sizes = sorted(self._buckets)
        self._addresses = Addresses(model, cache, self._fixed) if self._config.debug else None
        log.info("captured %s in %d %s for %s tokens", phase, self.num_pieces, self.what, self.sizes)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits ``[len(batch.logits_indices), vocab_size]``."""
        tokens = batch.num_tokens
        size = bucket_for(tokens, self.sizes) if tokens else None
        if size is None:
            return self._eagerly(batch)
        if self._addresses is not None:
            self._addresses.check()
        bucket = self._buckets[size]
        bucket.fill(batch)
        return self._run(bucket, batch)

    @abstractmethod
    def _prepare(self, most: int) -> None:
        """Make ready for captures of at most so many tokens."""

    @abstractmethod
    def _walk(self) -> None:
        """The largest step without graphs: for the budget, and to warm up."""

    @abstractmethod
    def _capture_bucket(self, bucket: TokenBucket, pool: Any) -> Any:
        """Capture the graphs of a bucket into a pool; return the pool."""

    @abstractmethod
    def _run(self, bucket: TokenBucket, batch: Batch) -> Tensor:
        """Run a batch that the bucket was filled with."""

    def _eagerly(self, batch: Batch) -> Tensor:
        if not self._said and batch.num_tokens:
            self._said = True
            most = self.sizes[-1] if self.sizes else "none"
            log.warning("a %s of %d tokens is above the largest captured size (%s) and runs eagerly", self._phase,
                        batch.num_tokens, most)  # fmt: skip
        logits: Tensor = self._model(batch, self._cache.layers)
        return logits

    def _wanted_sizes(self) -> list[int]:
        if self._phase == "decode":
            return capture_sizes(self._config, self._backend.limits.capture_sizes, self._cache.spec.num_blocks - 1)
        most = min(self._backend.config.max_prefill_tokens, LARGEST)
        defaults = [size for exponent in range(32) if (size := SMALLEST << exponent) < most]
        return capture_sizes(self._config, (*defaults, most), self._backend.config.max_prefill_tokens)

    def _inputs(self, tokens: int) -> Batch:
        """A batch of so many tokens, all of them padding, of which graphs read the rows: at fixed addresses."""
        device, block_size = self._backend.device.torch, self._cache.spec.block_size
        decodes = self._phase == "decode"
        sequences = tokens if decodes else 1
        batch = example_batch(tokens, sequences, 1, columns=1 if decodes else -(-tokens // block_size), device=device)
        batch.slot_mapping.copy_(dummy_slots(tokens, block_size, device))
        # There are kernels that refuse a sequence that is longer than the cache: what it leaves is nobody's.
        length = min(tokens // sequences, self._cache.spec.num_tokens)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * length
        for tensor in (batch.query_start_loc, batch.query_start_loc_host):
            tensor.copy_(starts)
        for tensor in (batch.kv_lens, batch.kv_lens_host):
            tensor.fill_(length)
        return batch

    def _capture(self, sizes: list[int]) -> None:
        backend, pool = self._backend, None
        try:
            with backend.explaining(), torch.inference_mode():
                budget = CaptureBudget.measure(backend, sizes, self._walk, phase=self._phase, graphs=self.num_pieces)
        except DeviceOutOfMemory as error:
            raise CaptureError(f"a step of {sizes[-1]} tokens is too much: {error.problem}", error.remedy) from error
        log.info("%s", budget)
        budget.check()
        for size in reversed(sizes):
            bucket = TokenBucket(self._fixed, size, self._cache.spec.block_size)
            try:
                with torch.inference_mode():
                    pool = self._capture_bucket(bucket, pool)
            except BaseException as error:
                bucket.drop()
                if not isinstance(error, CaptureError) or self._config.on_capture_error == "raise":
                    for each in self._buckets.values():
                        each.drop()
                    self._buckets.clear()
                    raise
                log.warning("%s batches of %d tokens run eagerly or in a larger bucket: %s", self._phase, size, error)
                continue
            self._buckets[size] = bucket
            backend.graphs.update(bucket.graphs)


def dummy_slots(tokens: int, block_size: int, device: torch.device) -> Tensor:
    """Where padding writes its keys and values: ``[tokens]``, int32, in the block that no sequence has."""
    return DUMMY_BLOCK * block_size + torch.arange(tokens, dtype=torch.int32, device=device) % block_size
