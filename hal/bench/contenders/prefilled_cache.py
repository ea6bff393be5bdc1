"""The keys and values of a prefill, for the caches of decode steps with a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import hal
from hal import ops
from hal.bench.bench_errors import BenchmarkError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel

TOKENS = 1024
"""Tokens to prefill, in as many sequences as this allows. Prefilling more would take longer than the measurement."""
SEQUENCES = 16
"""The most sequences to prefill; larger batches repeat them."""


def prefill(runner: hal.Runner, batch_size: int, length: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Return each layer's keys and values of some sequences, each ``[sequences, length, num_kv_heads, head_dim]``.

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
        with _stored() as written:
            runner.step(runner.batch([row], [blocks]))
        found.append(_by_layer(written, len(runner.spec.layers), length))
    layers = zip(*found, strict=True)
    return [(torch.stack([keys for keys, _ in each]), torch.stack([values for _, values in each])) for each in layers]


def prompts(vocab_size: int, batch_size: int, length: int) -> list[list[int]]:
    """Return the prompts of ``length`` tokens that are prefilled; a larger batch repeats them."""
    rows = max(1, min(batch_size, SEQUENCES, TOKENS // length))
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()


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
