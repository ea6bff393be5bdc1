"""The memory that a runner needs, measured before it exists, and the number of blocks that fit beside it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from functools import partial

import attrs
import torch

from hal.config.bounds import SEQUENCES, check_count
from hal.drivers.backend import Backend
from hal.drivers.compiler import EAGER
from hal.errors import ConfigError
from hal.execution.capture.capture_sizes import (
    MARGIN,
    capture_sizes,
    growth_in,
    prompt_tokens_to_capture,
    queries_to_capture,
)
from hal.execution.encoding import most_tokens
from hal.execution.state_spec import block_size_for, check_fits, check_placed, longest_sequence, spec_of
from hal.nn import CausalLM
from hal.nn.model import flat_outputs
from hal.step import LAST, Batch, StateMemory, StateSpec
from hal.step.fields import DUMMY_BLOCK
from hal.step.padding import padding_batch
from hal.step.rows import taken


@attrs.frozen
class MemoryPlan:
    """The memory of a runner by purpose, in bytes. ``str(plan)`` is a table.

    Attributes:
        total: the device's memory.
        share: the fraction of it, and of what is free, that this process may use.
        free: free on the device beside the loaded model.
        held: held by this process: the weights and everything else, on a CPU also its code.
        weights: the model's parameters and buffers, in ``held``.
        step: the growth in the largest step; None if the device cannot measure it.
        captures: the estimated memory of the graphs; None if the device cannot measure it.
        encoder: the growth in the largest step of the model's encoder; 0 for a model without, and None if the device
            cannot measure it.
        embeddings: the bytes of the embeddings that are kept; see ``cache.num_embeddings``.
        spec: the states, for one block and the sequences that the config sets.
    """

    total: int
    share: float
    free: int
    held: int
    weights: int
    step: int | None
    captures: int | None
    spec: StateSpec
    encoder: int | None = 0
    embeddings: int = 0

    @property
    def available(self) -> int:
        """The bytes for states."""
        # The encoder's step and a step of the model do not run at the same time.
        return max(0, self._usable - max(self.step or 0, self.encoder or 0) - (self.captures or 0) - self.embeddings)

    @property
    def _usable(self) -> int:
        # The share of what is free leaves room for other processes, which may grow before the states are allocated.
        return min(int(self.total * self.share) - self.held, int(self.free * self.share))

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, of all layers."""
        return self.spec.token_bytes * self.spec.block_size

    @property
    def sequence_bytes(self) -> int:
        """The bytes of all states per sequence."""
        return attrs.evolve(self.spec, num_blocks=0).nbytes

    @property
    def num_blocks(self) -> int:
        """The number of blocks that fit, including the dummy block; 0 for a model without states per token."""
        return max(0, self.available - self.sequence_bytes) // self.block_bytes if self.block_bytes else 0

    def __str__(self) -> str:
        rows: list[tuple[str, int | None]] = [
            ("device", self.total),
            (f"usable, {self.share:.0%}", self._usable + self.held),
            ("weights", self.weights),
            ("held beside the weights", self.held - self.weights),
            ("largest step", self.step),
            ("captures, estimated", self.captures),
            *([("largest step of the encoder", self.encoder)] if self.encoder != 0 else []),
            *([("embeddings that are kept", self.embeddings)] if self.embeddings else []),
            ("states per sequence", self.sequence_bytes),
            ("left for blocks", self.available - self.sequence_bytes),
        ]
        lines = [
            f"{name:<32}{'not measured' if size is None else f'{size / (1 << 20):,.1f} MiB':>16}" for name, size in rows
        ]
        tokens = max(0, self.num_blocks - DUMMY_BLOCK - 1) * self.spec.block_size
        return "\n".join(
            [*lines, f"{self.num_blocks:,} blocks of {self.block_bytes / 1024:,.1f} KiB: {tokens:,} tokens"]
        )


def plan_memory(
    model: CausalLM, backend: Backend, *, max_sequences: int, max_length: int | None = None, share: float = 0.9
) -> MemoryPlan:
    """Measure the memory of a model's largest steps, and return how many blocks fit beside it.

    Runs a step of ``max_prefill_tokens`` tokens in ``max_sequences`` sequences eagerly, the first of which ends at
    ``max_length``; and one of the largest size to capture. Captures nothing: graphs of several sizes take little more
    memory than an eager step of the largest. Of a model with an encoder, one step of the largest size runs, too. Ranks
    that step together call it together. Each plans for its own device; use the smallest ``num_blocks``.

    Args:
        model: loaded on the backend.
        backend: its config has the compiler, ``max_prefill_tokens`` and the block size.
        max_sequences: the most sequences of a batch.
        max_length: the most tokens of a sequence; None for the model's maximum.
        share: the fraction of the device's memory, and of what is free, that this process may use; above 0, at most 1.

    Raises:
        ConfigError: an argument is out of range, or the model was loaded for another backend.
        DeviceOutOfMemory: a step does not fit.
        ClosedError: the backend is closed.
    """
    check_count(max_sequences, SEQUENCES, "max_sequences must be")
    if not 0 < share <= 1:
        raise ConfigError(f"share is {share!r:.70}", "pass a fraction above 0 and at most 1")
    with backend.uses:
        check_placed(model, backend)
        spec = attrs.evolve(spec_of(model, backend), num_blocks=DUMMY_BLOCK + 1)
        longest = longest_sequence(model, max_length)
        tokens = max(min(backend.config.max_prefill_tokens, max_sequences * longest), max_sequences)
        # The first step may load kernels, so it is not counted.
        steps = [[1], _shared(tokens, max_sequences), *_captured(backend, max_sequences, longest)]
        backend.device.synchronize()
        gc.collect()  # Garbage is not held, and if it were freed during a step, it would hide some of its growth.
        backend.device.empty_cache()
        stats = backend.device.memory_stats()
        token = backend.enter()
        try:
            with backend.translating_errors(), torch.inference_mode():
                _, step, *captured = _growths(model, backend, steps, longest)
                encoder, embeddings = _encoder_bytes(model, backend)
        finally:
            backend.leave(token)
        backend.device.empty_cache()
    known = [each for each in captured if each is not None]
    captures = round(MARGIN * sum(known)) if len(known) == len(captured) else None
    return MemoryPlan(
        total=stats.total,
        share=share,
        free=stats.free,
        held=stats.allocated,
        weights=_weight_bytes(model),
        step=step,
        captures=captures,
        spec=spec,
        encoder=encoder,
        embeddings=embeddings,
    )


def _captured(backend: Backend, max_sequences: int, longest: int) -> Iterator[list[int]]:
    """Yield the lengths of the new tokens in the largest step to capture, for each phase that is captured."""
    compilation, limits = backend.config.compilation, backend.limits
    if (decode := compilation.of("decode")).compiler != EAGER:
        most = capture_sizes(decode, limits.capture_sizes, max_sequences)[-1]
        yield [min(longest, max(queries_to_capture(decode)))] * most
    if (prefill := compilation.of("prefill")).compiler != EAGER:
        tokens = prompt_tokens_to_capture(prefill, backend.config.max_prefill_tokens)[-1]
        yield _shared(tokens, math.ceil(tokens / longest))


def _shared(tokens: int, sequences: int) -> list[int]:
    """Return the lengths of ``sequences`` sequences that share ``tokens`` tokens equally."""
    return [tokens // sequences + (row < tokens % sequences) for row in range(sequences)]


def _growths(model: CausalLM, backend: Backend, steps: Sequence[list[int]], longest: int) -> list[int | None]:
    """Return the growth of memory in each of the steps, which are given as the new tokens of each sequence.

    The steps are padding, on a cache of as many blocks as they name: some kernels check the number.
    """
    size, device = block_size_for(model, backend), backend.device
    cached = [[longest - lengths[0], *[0] * (len(lengths) - 1)] for lengths in steps]
    blocks = max(
        sum(math.ceil((start + new) / size) for start, new in zip(starts, lengths, strict=True))
        for starts, lengths in zip(cached, steps, strict=True)
    )
    spec = spec_of(model, backend, blocks + DUMMY_BLOCK + 1)
    check_fits(spec, backend)
    states = backend.allocate(spec)
    found = list[int | None]()
    for starts, lengths in zip(cached, steps, strict=True):
        batch = padding_batch(model.batch_type, lengths, block_size=size, device=device.torch, cached=starts)
        device.synchronize()
        device.empty_cache()
        _, growth = growth_in(partial(_step, model, batch, states), device)
        found.append(growth)
    return found


def _step(model: CausalLM, batch: Batch, states: StateMemory) -> None:
    (hidden, *_) = flat_outputs(model, model(batch, states.layers))
    if model.has_logits:
        model.logits(taken(hidden, LAST, batch, batch.shape))


def _encoder_bytes(model: CausalLM, backend: Backend) -> tuple[int | None, int]:
    """Return the growth of memory in the largest step of the model's encoder, and the bytes of the embeddings kept."""
    if (encoder := model.encoder) is None:
        return 0, 0
    item, device = encoder.example(most_tokens(encoder, backend)), backend.device
    batch = encoder.batch([item]).to(device.torch)
    encoder(encoder.batch([encoder.example(1)]).to(device.torch))  # It may load kernels, so it is not counted.
    device.synchronize()
    device.empty_cache()
    found, growth = growth_in(partial(encoder, batch), device)
    return growth, backend.config.cache.num_embeddings * found.shape[1] * found.element_size()


def _weight_bytes(model: CausalLM) -> int:
    return sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
