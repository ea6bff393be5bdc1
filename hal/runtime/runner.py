"""The runner: what an engine drives. It owns the model's cache and its graphs; the engine owns blocks and slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hal.backend import Backend
from hal.batch import Batch
from hal.errors import BackendNotActive, BatchError
from hal.kv_cache import DUMMY_BLOCK, KVCacheSpec
from hal.nn import CausalLM
from hal.runtime.blocks import BlockAllocator
from hal.runtime.decode import GraphDecoder


class Runner:
    """Runs prefill and decode steps of one model on one backend, as the backend's config says.

    Prefill is eager. Decode is eager or, with the compiler ``graph``, a captured graph per batch-size bucket. Every
    mode gives the same tokens.

    Args:
        model: from :func:`hal.load_model`, or built and filled otherwise; on the backend's device.
        backend: must be the active one whenever the runner is used.

    Attributes:
        spec: of the cache.
        cache: the keys and values.
        blocks: hands out the cache's blocks, for an engine that keeps no account of its own; :func:`hal.generate` does.

    Raises:
        CaptureError: a decode graph could not be captured.
        BackendNotActive: another backend is active.
    """

    def __init__(self, model: CausalLM, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self._require_active()
        config, parameter = backend.config, next(model.parameters())
        self.spec = KVCacheSpec(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=parameter.dtype,
            num_blocks=math.ceil(config.cache.num_tokens / backend.block_size) + 1,
            block_size=backend.block_size,
        )
        self.cache = backend.kv_cache(self.spec)
        self.blocks = BlockAllocator(self.spec.num_blocks)
        self._decode: Callable[[Batch], Tensor] = self._eager
        if config.compilation.compiler == "graph":
            self._decode = GraphDecoder(model, backend, self.cache)

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
        for row, (tokens, blocks) in enumerate(zip(token_ids, block_ids, strict=False)):
            length = len(tokens) + (cached[row] if cached else 0)
            if length > self.model.max_length:
                raise BatchError(
                    f"sequence {row} would be {length} tokens long; the model takes {self.model.max_length}",
                    "shorten the prompt, or ask for fewer new tokens",
                )
            self._check_range(row, "token id", tokens, 0, self.model.vocab_size)
            self._check_range(row, "block", blocks, DUMMY_BLOCK + 1, self.spec.num_blocks)
        return Batch.build(
            token_ids,
            block_ids,
            block_size=self.spec.block_size,
            cached=cached,
            all_logits=all_logits,
            device=self.backend.device.torch,
        )

    def prefill(self, batch: Batch) -> Tensor:
        """Run new sequences, or new tokens of known ones.

        Returns:
            Logits ``[len(batch.logits_indices), vocab_size]``, of the weights' dtype.
        """
        self._require_active()
        with torch.inference_mode():
            return self._eager(batch)

    def decode(self, batch: Batch) -> Tensor:
        """Run one more token of every sequence.

        Returns:
            Logits ``[sequences, vocab_size]``, of the weights' dtype; valid until the next decode.

        Raises:
            BatchError: a sequence has other than one new token.
        """
        self._require_active()
        if batch.num_tokens != batch.num_sequences:
            raise BatchError(
                f"decode was given {batch.num_tokens} tokens for {batch.num_sequences} sequences",
                "give one token a sequence, or call prefill",
            )
        with torch.inference_mode():
            return self._decode(batch)

    def _eager(self, batch: Batch) -> Tensor:
        logits: Tensor = self.model(batch, self.cache.layers)
        return logits

    def _require_active(self) -> None:
        if not self.backend.active:
            raise BackendNotActive(
                f"this runner is on the backend {self.backend.name}, and another (or none) is active",
                "call activate() of the runner's backend before using it",
            )

    def _check_range(self, row: int, what: str, numbers: Sequence[int], low: int, high: int) -> None:
        if numbers and not (low <= min(numbers) and max(numbers) < high):
            wrong = next(number for number in numbers if not low <= number < high)
            raise BatchError(
                f"sequence {row} has {what} {wrong}, out of the range {low} to {high - 1}",
                "check that tokenizer, model and cache belong together",
            )
