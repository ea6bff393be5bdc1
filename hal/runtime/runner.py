"""The runner: what an engine drives. It owns the model's cache and its graphs; the engine owns blocks and slots."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch, Bounds, one_query_each
from hal.errors import BackendNotActive, BatchError, ConfigError
from hal.graph import CAPTURING
from hal.kv_cache import DUMMY_BLOCK, KVCache, KVCacheSpec
from hal.nn import CausalLM
from hal.runtime.blocks import BlockAllocator
from hal.runtime.logits import check_logits
from hal.runtime.prefixes import PrefixCache


def _run(model: CausalLM, cache: KVCache, batch: Batch) -> Tensor:
    logits: Tensor = model(batch, cache.layers)
    return logits


_ROWS = ("block_table", "kv_lens_host", "query_start_loc", "query_start_loc_host", "positions", "slot_mapping")


class Runner:
    """Runs prefill and decode steps of one model on one backend, as the backend's config says.

    Prefill is eager, or in captured pieces with the compiler ``piecewise``. Decode is eager; or a captured graph per
    batch-size bucket, with the compiler ``graph``; or in captured pieces, with ``piecewise``; or compiled by Inductor,
    with ``inductor``. Every mode gives the same tokens, up to rounding.

    Args:
        model: from :func:`hal.load_model`, or built and filled otherwise; on the backend's device.
        backend: must be the active one whenever the runner is used.

    Attributes:
        spec: of the cache.
        cache: the keys and values.
        blocks: hands out the cache's blocks; :func:`hal.generate` takes them here, and so can an engine.
        prefixes: if the config says ``reuse_prefixes``, hands out blocks in place of ``blocks``, shared by sequences
            that begin alike; it keeps what was used, so an engine beside it takes its blocks here, too.

    Raises:
        ConfigError: the cache does not fit the device's memory, the compiler is not one that the runner runs, or the
            model was loaded for another backend.
        CaptureError: a decode graph could not be captured.
        CompileError: the decode step could not be compiled.
        BackendNotActive: another backend is active.
    """

    def __init__(self, model: CausalLM, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self._require_active()
        if model.prepared_by not in (None, backend.name):
            raise ConfigError(
                f"the model's weights were prepared by the backend {model.prepared_by}, not by {backend.name}",
                "load the model once more, on the backend that is to run it",
            )
        config, parameter = backend.config, next(model.parameters())
        if parameter.device != backend.device.torch:
            raise ConfigError(
                f"the model is on {parameter.device}, and the backend {backend.name} on {backend.device.torch}",
                "load the model on the backend that is to run it, or move it there",
            )
        self.spec = KVCacheSpec(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=parameter.dtype,
            num_blocks=math.ceil(config.cache.num_tokens / backend.block_size) + 1,
            block_size=backend.block_size,
        )
        free = backend.device.memory_stats().free
        if self.spec.nbytes > free:
            gc.collect()  # a runner that is done with may wait for that: traces leave references in circles
            backend.device.empty_cache()
            free = backend.device.memory_stats().free
        if self.spec.nbytes > free:
            raise ConfigError(
                f"a cache of {self.spec.num_tokens} tokens takes {self.spec.nbytes >> 20} MiB of {free >> 20} MiB free",
                "lower cache.num_tokens",
            )
        with backend.explaining():
            self.cache = backend.kv_cache(self.spec)
        self.blocks = BlockAllocator(self.spec.num_blocks)
        self.prefixes = PrefixCache(self.blocks, self.spec.block_size) if config.cache.reuse_prefixes else None
        self._bounds = Bounds(model.vocab_size, DUMMY_BLOCK + 1, self.spec.num_blocks, model.max_length)
        self._decoded = False
        # No method of this object: a runner in a cycle would keep its graphs until the next collection.
        eager = partial(_run, model, self.cache)
        self._decode: Callable[[Batch], Tensor] = eager
        self._prefill: Callable[[Batch], Tensor] = eager
        with backend.explaining():
            self._make_decoder()

    def _make_decoder(self) -> None:
        decode, prefill = (self.backend.config.compilation.of(phase).compiler for phase in ("decode", "prefill"))
        if (decode, prefill) != ("eager", "eager"):
            with CAPTURING:  # for what is left on the device is counted before anything is captured
                self._make_steps(decode, prefill)

    def _make_steps(self, decode: str, prefill: str) -> None:
        model, backend = self.model, self.backend
        # The compile stack loads when something is compiled.
        if decode == "graph":
            from hal.runtime.decode import GraphDecoder

            self._decode = GraphDecoder(model, backend, self.cache)
        elif decode == "inductor":
            from hal.runtime.compiled import CompiledDecoder

            self._decode = CompiledDecoder(model, backend, self.cache)
        elif decode not in ("eager", "piecewise", "piecewise_eager"):
            self._decode = backend.decoder(decode, model, self.cache)
        if "piecewise" in (decode, prefill):
            from hal.runtime.pieces import PiecewiseStep

            if decode == "piecewise":
                self._decode = PiecewiseStep(model, backend, self.cache, "decode")
            if prefill == "piecewise":
                self._prefill = PiecewiseStep(model, backend, self.cache, "prefill")
        if "piecewise_eager" in (decode, prefill):
            from hal.runtime.markers import MarkedStep

            if decode == "piecewise_eager":
                self._decode = MarkedStep(model, backend, self.cache, "decode")
            if prefill == "piecewise_eager":
                self._prefill = MarkedStep(model, backend, self.cache, "prefill")

    def batch(
        self,
        token_ids: Sequence[Sequence[int]],
        block_ids: Sequence[Sequence[int]],
        *,
        cached: Sequence[int] | None = None,
        all_logits: bool = False,
    ) -> Batch:
        """:meth:`hal.Batch.build` for this runner's cache and device, with every number checked against the model's.

        Raises:
            BatchError: also for a token id or block out of range, or a sequence longer than the model was made for.
        """
        return Batch.build(
            token_ids,
            block_ids,
            block_size=self.spec.block_size,
            cached=cached,
            all_logits=all_logits,
            device=self.backend.device.torch,
            bounds=self._bounds,
        )

    def prefill(self, batch: Batch) -> Tensor:
        """Run new sequences, or new tokens of known ones, in steps of at most ``max_prefill_tokens`` of the config.

        Returns:
            Logits ``[len(batch.logits_indices), vocab_size]``, of the weights' dtype.

        Raises:
            BatchError: its tensors' shapes do not fit together; a logits index is not of its tokens; or it takes
                several steps, and its logits_indices are not sorted.
            ModelError: the model gave no logits, or not as many as were asked for.
        """
        self._require_active()
        self._check_rows(batch)
        steps = batch.split(self.backend.config.max_prefill_tokens)
        wanted = batch.logits_indices
        if len(steps) > 1 and bool((wanted.diff() < 0).any() or (wanted < 0).any()):
            raise BatchError(
                "logits_indices are negative or not sorted, and the batch takes several steps",
                "count from 0 and sort them",
            )
        with self.backend.explaining(), torch.inference_mode():
            found = [check_logits(self.model, self._prefill(step), step) for step in steps]
            return found[0] if len(found) == 1 else torch.cat(found)

    def decode(self, batch: Batch) -> Tensor:
        """Run one more token of every sequence.

        Returns:
            Logits ``[sequences, vocab_size]``, of the weights' dtype; valid until the next decode.

        Raises:
            BatchError: its tensors' shapes do not fit together, a sequence has other than one new token, or a logits
                index is not of its tokens.
            ModelError: the model gave no logits, or not as many as were asked for; found at the first decode.
        """
        self._require_active()
        self._check_rows(batch)
        size = batch.num_sequences
        # Lists, as one operation of torch would cost more than these few numbers.
        if not one_query_each(batch.num_tokens, batch.query_start_loc_host.tolist()):
            raise BatchError(
                f"decode was given {batch.num_tokens} tokens for {size} sequences, not one for each",
                "give one token a sequence, or call prefill",
            )
        if batch.logits_indices.shape[0] != size:
            raise BatchError(
                f"decode was asked for {batch.logits_indices.shape[0]} rows of logits for {size} sequences",
                "ask for one a sequence, or call prefill",
            )
        with self.backend.explaining(), torch.inference_mode():
            logits = self._decode(batch)
            if not self._decoded:  # once, as it is no more than the model's own mistake that it finds
                check_logits(self.model, logits, batch)
                self._decoded = True
            return logits

    def _require_active(self) -> None:
        if not self.backend.active:
            raise BackendNotActive(
                f"this runner is on the backend {self.backend.name}, and another (or none) is active",
                "call activate() of the runner's backend before using it",
            )

    def _check_rows(self, batch: Batch) -> None:
        """An engine's own tensors: kernels would read past the end of one that is too short.

        Which rows of logits are wanted is looked at where the host has it. On a device it is not: to read it there is
        to wait for all work before it, each step.
        """
        size, tokens = batch.num_sequences, batch.num_tokens
        if batch.logits_indices.is_cpu:
            indices = batch.logits_indices.tolist()  # as lists are faster than torch for these few
            if indices and not (min(indices) >= 0 and max(indices) < tokens):
                wrong = next(each for each in indices if not 0 <= each < tokens)
                raise BatchError(
                    f"the batch's logits_indices has {wrong}, and the step's tokens are 0 to {tokens - 1}",
                    "count from 0; a negative index does not count from the end, as steps are padded there",
                )
        wanted = (size, size, size + 1, size + 1, tokens, tokens)
        found = tuple(getattr(batch, name).size(0) for name in _ROWS)
        if found == wanted:
            return
        for name, rows, right in zip(_ROWS, found, wanted, strict=True):
            if rows != right:
                raise BatchError(
                    f"the batch's {name} has {rows} rows, not {right}, for {size} sequences of {tokens} tokens",
                    "give each tensor the shape that hal.Batch documents",
                )
