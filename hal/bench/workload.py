"""The inputs that all contenders share: the same tokens and cache, generated from fixed seeds.

With a checkpoint's weights, the cache of decode steps is what a prefill computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

import hal
from hal import ops
from hal.bench.plan import BenchmarkError, Setting, Workload
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.step import SEQUENCE, TOKEN
from hal.step.state import LayerStates

DRAWN = 16
"""Number of sequences with distinct caches; larger batches repeat them, because generation takes longer than a step."""
TOKENS = 1024
"""Tokens to prefill, in as many sequences as this allows. Prefilling more would take longer than the measurement."""
SEQUENCES = 16
"""The most sequences to prefill; larger batches repeat them."""


STORED: Mapping[str, tuple[str, ...]] = {
    "store_kv_cache": ("key", "value"),
    "store_latent_cache": ("latent", "rope"),
    "store_index_cache": ("index",),
}
"""The states that an operation writes, in the order of its first arguments."""
SCALES = frozenset({"key_scale", "value_scale"})
"""States that follow from others."""


def stored_by(states: LayerStates) -> list[str]:
    """Return the operations of :data:`STORED` that write a layer's states of each token, except those of rows."""
    return [name for name, written in STORED.items() if written[0] in states and states[written[0]].group == 1]


def rows_of(states: LayerStates) -> list[str]:
    """Return the other states per token, or per group of tokens, each of which ``store_index_cache`` writes.

    Raises:
        BenchmarkError: it does not write one of them.
    """
    known = SCALES.union(*(STORED[name] for name in stored_by(states)))
    found = [name for name, each in states.items() if each.per is TOKEN and name not in known]
    if wrong := [name for name in found if len(states[name].shape) != 1]:
        raise BenchmarkError(
            f"a layer has the state {wrong[0]!r} of shape {states[wrong[0]].shape}, which the benchmark cannot fill",
            "measure a model whose other states than keys and values are rows",
        )
    return found


@attrs.frozen(eq=False)
class Contender:
    """One implementation in one mode, ready to run its step repeatedly.

    Attributes:
        step: the timed function; computes the logits ``[batch, vocab_size]`` of each sequence's last token.
        reset: restores the cache before each step; not timed.
        setup_seconds: duration of preparation, with the first step, without loading weights.
        close: frees all resources except the weights; the contender cannot run afterwards.
        logits: returns the logits of what a step returned.
        comparable: whether it has the same weights and cache as the others, so that its logits are equal.
        fewer_bits: whether its weights take fewer bits than those that the floor counts.
    """

    name: str
    step: Callable[[], Any]
    reset: Callable[[], None]
    setup_seconds: float = 0.0
    close: Callable[[], None] = lambda: None
    logits: Callable[[Any], Tensor] = lambda returned: returned
    comparable: bool = True
    fewer_bits: bool = False


class Side(Protocol):
    """An implementation with its weights."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes that can be measured."""

    def contender(self, mode: str, inputs: Inputs) -> Contender:
        """Prepare a contender."""


@attrs.frozen(eq=False)
class Inputs:
    """The inputs of one batch size.

    Attributes:
        prefilled: what each layer keeps of some sequences, as :meth:`cached` returns it, which a prefill has
            computed. If there is none, it is random. Trained weights turn rounding into other logits on a random
            cache, while a step's duration and memory do not depend on the values.
    """

    setting: Setting
    batch_size: int
    prefilled: Sequence[Mapping[str, Tensor]] = ()

    @property
    def workload(self) -> Workload:
        """Return ``decode`` or ``prefill``."""
        return self.setting.plan.workload

    @property
    def length(self) -> int:
        """Return the tokens per sequence in the cache (decode) or in the prompt (prefill)."""
        return self.setting.plan.length

    @property
    def tokens(self) -> Tensor:
        """Return the new tokens ``[batch, 1]`` or ``[batch, length]``, int64, on the CPU."""
        shape = (self.batch_size, 1 if self.workload == "decode" else self.length)
        return torch.randint(self.setting.meta.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def cached(self, layer: int) -> Mapping[str, Tensor]:
        """Return what a layer keeps of the sequences, by name.

        These are its states: per sequence, each ``[batch, ...]``; per token, each ``[batch, length, ...]`` in the
        model's dtype, without the scales of quantized ones; per group, ``[batch, length // group, ...]``.

        Raises:
            BenchmarkError: a state is none that the benchmark can fill; see :func:`rows_of`.
        """
        model, device = self.setting.meta, self.setting.backend.device.torch
        if self.prefilled:
            held = self.prefilled[layer]
            rows = torch.arange(self.batch_size) % len(next(iter(held.values())))
            return {name: each[rows].to(device) for name, each in held.items()}
        generator = torch.Generator().manual_seed(1 + layer)
        drawn = min(self.batch_size, DRAWN)
        states, dtype = model.states[layer], self.setting.dtype
        kept = {name: (each.shape, each.dtype or dtype) for name, each in states.items() if each.per is SEQUENCE}
        others = {name: states[name] for name in rows_of(states)}
        kept |= {name: ((self.length // each.group, *each.shape), dtype) for name, each in others.items()}
        for operation in stored_by(states):
            names = [name for name in STORED[operation] if name in states]
            kept |= {name: ((self.length, *states[name].shape), dtype) for name in names}
        repeated = torch.arange(self.batch_size, device=device) % drawn

        def fill(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
            if not kind.is_floating_point:  # tokens
                return torch.randint(model.vocab_size, (drawn, *shape), dtype=kind, generator=generator)
            return torch.empty(drawn, *shape, dtype=kind).normal_(generator=generator)

        return {name: fill(*each).to(device)[repeated] for name, each in kept.items()}


def prefill(runner: hal.Runner, batch_size: int, length: int) -> Sequence[Mapping[str, Tensor]]:
    """Return what each layer keeps of some sequences; see :meth:`hal.bench.workload.Inputs.cached`.

    Args:
        runner: runs steps eagerly, with a cache for a sequence of ``length`` tokens.
        length: tokens of each.

    Raises:
        BenchmarkError: the model does not write its cache with operations of :data:`STORED`, once in each layer of a
            step.
    """
    blocks = [*range(1, 1 + runner.spec.blocks_for(length))]
    found = []
    for row in prompts(runner.model.vocab_size, batch_size, length):
        slots = runner.slots.take(1) or [] if runner.slots.needed else []
        with _stored() as written:
            runner.step(runner.batch([row], [blocks], **({"slots": slots} if slots else {})))
        found.append(_kept(runner, written, slots, length))
        runner.slots.give_back(slots)
    layers = zip(*found, strict=True)
    return [{name: torch.stack([row[name] for row in rows]) for name in rows[0]} for rows in layers]


def prompts(vocab_size: int, batch_size: int, length: int) -> list[list[int]]:
    """Return the prompts of ``length`` tokens that are prefilled; a larger batch repeats them."""
    rows = max(1, min(batch_size, SEQUENCES, TOKENS // length))
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()


def _kept(
    runner: hal.Runner, written: Mapping[str, Sequence[tuple[Tensor, ...]]], slots: Sequence[int], length: int
) -> list[dict[str, Tensor]]:
    """Return what each layer keeps of a sequence, on the CPU."""
    if others := [name for layer in runner.spec.layers for name in rows_of(layer)]:
        raise BenchmarkError(
            f"a layer keeps the state {others[0]!r}, which the benchmark cannot take from a checkpoint's prefill",
            "measure shapes with random weights (--shapes)",
        )
    used = [stored_by(layer) for layer in runner.spec.layers]
    rows = {name: iter(_by_layer(name, written[name], sum(name in each for each in used), length)) for name in STORED}
    found: list[dict[str, Tensor]] = []
    for layer, state, operations in zip(runner.spec.layers, runner.states.layers, used, strict=True):
        kept = {name: state[name][slots[0]].cpu().clone() for name, each in layer.items() if each.per is SEQUENCE}
        for operation in operations:
            named = zip(STORED[operation], next(rows[operation]), strict=True)
            kept |= {name: values for name, values in named if name in layer}
        found.append(kept)
    return found


def _by_layer(
    operation: str, written: Sequence[tuple[Tensor, ...]], layers: int, length: int
) -> list[tuple[Tensor, ...]]:
    """Return the rows of each layer. A long prompt takes several steps, each of which writes all layers."""
    found: list[tuple[Tensor, ...]] = []
    for layer in range(min(layers, len(written))):
        found.append(tuple(torch.cat(each) for each in zip(*written[layer::layers], strict=True)))
    if [len(rows[0]) for rows in found] != [length] * layers:
        raise BenchmarkError(
            f"a prefill of {length} tokens wrote {sum(len(rows[0]) for rows in written)} rows in {layers} layers with "
            f"{operation}",
            "measure the model with --shapes, or write each layer's cache once in a step, with that operation",
        )
    return found


@contextmanager
def _stored() -> Iterator[dict[str, list[tuple[Tensor, ...]]]]:
    """Record the rows that operations of :data:`STORED` write inside the block, in order, on the CPU."""
    found: dict[str, list[tuple[Tensor, ...]]] = {name: [] for name in STORED}

    def wrap(operation: Operation, kernel: Kernel) -> Kernel:
        if operation.name not in STORED:
            return kernel

        def recording(*args: Any) -> Any:
            rows = args[: len(STORED[operation.name])]
            found[operation.name].append(tuple(each.cpu().clone() for each in rows))
            return kernel(*args)

        return recording

    with ops.intercepted(wrap):
        yield found
