"""The keys, values and states of a prefill, for the caches of decode steps with a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops
from hal.bench.bench_errors import BenchmarkError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.step import SEQUENCE

TOKENS = 1024
"""Tokens to prefill, in as many sequences as this allows. Prefilling more would take longer than the measurement."""
SEQUENCES = 16
"""The most sequences to prefill; larger batches repeat them."""


def prefill(runner: hal.Runner, batch_size: int, length: int) -> Sequence[Mapping[str, Tensor]]:
    """Return what each layer keeps of some sequences; see :meth:`hal.bench.contenders.workload.Inputs.cached`.

    Args:
        runner: runs steps eagerly, with a cache for a sequence of ``length`` tokens.
        batch_size: the most sequences.
        length: tokens of each.

    Raises:
        BenchmarkError: the model does not write its cache with ``store_kv_cache``, once in each layer of a step.
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
    runner: hal.Runner, written: Sequence[tuple[Tensor, Tensor]], slots: Sequence[int], length: int
) -> list[dict[str, Tensor]]:
    """Return what each layer keeps of a sequence, on the CPU."""
    per_sequence = [[name for name, each in layer.items() if each.per is SEQUENCE] for layer in runner.spec.layers]
    cached = iter(_by_layer(written, per_sequence.count([]), length))
    return [
        {name: state[name][slots[0]].cpu().clone() for name in names}
        or dict(zip(("key", "value"), next(cached), strict=True))
        for names, state in zip(per_sequence, runner.states.layers, strict=True)
    ]


def _by_layer(written: Sequence[tuple[Tensor, Tensor]], layers: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values of each layer. A long prompt takes several steps, each of which writes all layers."""
    found = []
    for layer in range(min(layers, len(written))):
        keys, values = zip(*written[layer::layers], strict=True)
        found.append((torch.cat(keys), torch.cat(values)))
    if [len(keys) for keys, _ in found] != [length] * layers:
        raise BenchmarkError(
            f"a prefill of {length} tokens wrote {sum(len(keys) for keys, _ in written)} keys in {layers} layers",
            "measure the model with --shapes, or write each layer's cache once in a step, with store_kv_cache",
        )
    return found


@contextmanager
def _stored() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the keys and values that are written to a cache inside the block, in order, on the CPU."""
    found: list[tuple[Tensor, Tensor]] = []

    def wrap(operation: Operation, kernel: Kernel) -> Kernel:
        if operation.name != "store_kv_cache":
            return kernel

        def recording(key: Tensor, value: Tensor, *rest: Any) -> Any:
            found.append((key.cpu().clone(), value.cpu().clone()))
            return kernel(key, value, *rest)

        return recording

    with ops.intercepted(wrap):
        yield found
