"""The floor: the duration of a step if the hardware did only the unavoidable work.

A decode step reads every weight and every cached key and value once, at the memory read bandwidth, and reads and writes
the states per sequence; of a mixture of experts, only the weights of the experts that the batch chooses, and of a cache
with an index, only what it selects. If the products of the weights take longer than reading them, at the device's
highest rate, this time counts in place of the reading. A prefill multiplies, at the device's highest rate, or that of a
large matmul where the driver does not offer it. All rates are measured in the same rounds as the contenders.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from hal.bench.plan import Setting
from hal.bench.routing import (
    Routing,
    active_bytes,
    assigned_numbers,
    expert_projections,
    expert_weights,
    packed_weights,
)
from hal.bench.workload import Contender
from hal.device.device import Device
from hal.nn import Attention, CausalLM, Embedding, LatentAttention, Linear, QuantizedEmbedding
from hal.step import SEQUENCE

READ_BYTES = 1 << 30
"""Initial size of the buffer to read, far larger than any cache."""
SHORTEST_READ, MOST_READ_BYTES = 2e-3, 8 << 30
"""Minimum duration of a read in seconds, to make launch overhead small; a fast device reads a larger buffer for it."""
MATMUL_SIZES = (512, 1024, 2048, 4096, 8192)
"""Sizes of square matmuls to try; the one with the highest rate counts."""
LONGEST_TRIAL = 0.1
"""Duration in seconds after which no larger matmul is tried."""


@attrs.frozen(eq=False)
class Probe:
    """A contender that only reads, or only multiplies.

    Attributes:
        amount: bytes or operations per step.
    """

    contender: Contender
    amount: int
    description: str


@attrs.frozen
class Work:
    """The unavoidable work of a step.

    Attributes:
        parts: bytes or operations by purpose.
        unit: ``bytes`` or ``operations``.
    """

    parts: dict[str, int]
    unit: str

    @property
    def total(self) -> int:
        """Return the sum of the parts."""
        return sum(self.parts.values())

    @property
    def weights(self) -> int:
        """Return the sum of the parts that are weights."""
        return sum(self.parts.get(name, 0) for name in ("weights", "experts"))


def work(setting: Setting, batch_size: int, routings: Sequence[Routing] = (), loaded: nn.Module | None = None) -> Work:
    """Return the unavoidable work of the plan's step at a batch size.

    Args:
        setting: the plan and its model.
        routings: the choice of experts in each sparse layer.
        loaded: hal's model with its values, if there is one.
    """
    model, length = setting.meta, setting.plan.length
    if setting.plan.workload == "decode":
        return decode_bytes(model, setting.dtype, batch_size, length, routings, loaded)
    heads = int(setting.checkpoint.model_config["num_attention_heads"]) // setting.backend.mesh.tensor.size
    return prefill_operations(model, heads, batch_size, length, routings)


def decode_bytes(
    model: CausalLM,
    dtype: torch.dtype,
    batch_size: int,
    context: int,
    routings: Sequence[Routing] = (),
    loaded: nn.Module | None = None,
) -> Work:
    """Return the bytes that a decode step moves.

    It reads all weights, and keys and values of ``context`` tokens per sequence, or of those that a selection finds.
    States per sequence are read and written.

    Embedding lookups are omitted. A table that is also the output projection counts once. Of the experts' weights,
    those of the chosen experts count.

    Args:
        model: without values.
        context: tokens of each sequence in the cache.
        routings: the choice of experts in each sparse layer.
        loaded: the model with its values, whose quantized weights are counted as they are held; None for the model.

    Raises:
        BenchmarkError: the sparse layers do not correspond to the routings.
    """
    experts = expert_weights(model)
    weights = sum(each.numel() for each in model.parameters()) - sum(each.numel() for each in experts)
    packed = sum(each.nbytes for each in packed_weights(loaded or model))
    if not model.tied:
        weights -= sum(each.rows * each.width for each in model.modules() if isinstance(each, Embedding))
    cache = states = 0
    for state in (each for layer in model.states for each in layer.values()):
        entry = batch_size * math.prod(state.shape) * (state.dtype or dtype).itemsize
        if state.per is SEQUENCE:
            states += 2 * entry
        else:
            read = context if state.window is None else min(context, state.window - 1)
            cache += entry * min(read, state.selected or read) // state.group
    active = active_bytes(model, dtype, routings, loaded)
    chosen = {"experts": active} if active else {}
    moved = {"states": states} if states else {}
    return Work({"weights": weights * dtype.itemsize + packed, **chosen, "cache": cache, **moved}, "bytes")


def decode_products(model: CausalLM, batch_size: int, routings: Sequence[Routing] = ()) -> Work:
    """Return the operations of a decode step's products: two per weight and sequence.

    Each sequence is multiplied by the weights of the experts that were chosen for it. Quantized weights are omitted,
    because integers may be multiplied at a higher rate than the dtype of computation.

    Args:
        model: without values.
        routings: the choice of experts in each sparse layer.

    Raises:
        BenchmarkError: the sparse layers do not correspond to the routings.
    """
    projections = _projections(model)
    plain = [each for each in projections if _weight(each).is_floating_point()]
    numbers = sum(map(_numbers, plain))
    if model.tied:
        tables = (each for each in model.modules() if isinstance(each, Embedding))
        numbers += sum(each.rows * each.width for each in tables if not isinstance(each, QuantizedEmbedding))
    assigned = assigned_numbers(model, routings, quantized=False)
    chosen = {"experts": 2 * assigned} if assigned else {}
    name = "projections" if len(plain) == len(projections) else "unquantized projections"
    return Work({name: 2 * numbers * batch_size, **chosen}, "operations")


def prefill_operations(
    model: CausalLM, num_heads: int, batch_size: int, tokens: int, routings: Sequence[Routing] = (), *, cached: int = 0
) -> Work:
    """Return the operations of a prefill: two per projection weight and token, and those of attention.

    Each token is multiplied by the weights of the experts that were chosen for it.

    The output projection runs for the last token of each sequence only. Causal attention of token ``i`` multiplies with
    ``cached + i + 1`` keys, in two matmuls. A gated delta rule multiplies a head's matrix with the key, adds an outer
    product to it, and multiplies it with the query.

    Raises:
        BenchmarkError: the sparse layers do not correspond to the routings.
    """
    tables = [each for each in model.modules() if isinstance(each, Embedding)]
    packed = [each for each in tables if isinstance(each, QuantizedEmbedding)]
    table = sum(each.rows * each.width for each in tables)
    projections = sum(map(_numbers, _projections(model)))
    # The output projection has the table's size. A quantized table is among the projections.
    inner = projections if model.tied and not packed else projections - table
    dims = sum(_attention_dims(each, cached, tokens) for each in model.modules())
    assigned = assigned_numbers(model, routings)
    chosen = {"experts": 2 * assigned} if expert_projections(model) else {}
    matrices = sum(math.prod(layer["matrix"].shape) for layer in model.states if "matrix" in layer)
    recurrent = {"recurrence": 6 * matrices * tokens * batch_size} if matrices else {}
    return Work(
        {
            "projections": 2 * inner * tokens * batch_size,
            **chosen,
            "output projection": 2 * table * batch_size,
            "attention": 2 * dims * num_heads * batch_size,
            **recurrent,
        },
        "operations",
    )


def _projections(model: CausalLM) -> list[Linear]:
    """Return the projections, except those of experts, which are counted by their rows."""
    found = (each for each in model.modules() if isinstance(each, Linear))
    return [each for each in found if each.num_experts is None]


def _numbers(layer: Linear) -> int:
    """Return the numbers of a projection's weight."""
    held = _weight(layer).numel()
    return held * layer.form.kind.count // layer.form.kind.elements if layer.quantized else held


def _weight(layer: Linear) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _attention_dims(layer: nn.Module, cached: int, tokens: int) -> int:
    """Return the elements that a head's queries multiply with keys and weights with values; those of an index omitted.

    Latent attention is counted with expanded keys and values.
    """
    if isinstance(layer, Attention):
        return 2 * layer.head_dim * _pairs(cached, tokens, layer.options.window)
    if isinstance(layer, LatentAttention):
        dims = sum(layer.query_dims) + layer.kv_b_proj.dims[1]
        return dims * _pairs(cached, tokens, layer.states["latent"].selected)
    return 0


def _pairs(cached: int, tokens: int, window: int | None) -> int:
    """Return the pairs of a new token and a key, for ``tokens`` new ones after ``cached``."""
    return _causal_pairs(cached + tokens, window) - _causal_pairs(cached, window)


def _causal_pairs(tokens: int, window: int | None) -> int:
    seen = tokens if window is None else min(tokens, window)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


def read_probe(device: Device) -> Probe:
    """Return a probe that reads a large buffer with the fastest reduction."""
    nbytes = min(READ_BYTES, device.memory_stats().free // 8)
    while True:
        buffer = torch.ones(nbytes // 4, device=device.torch)
        reductions = _reductions(buffer)
        if (reading := device.reading(buffer)) is not None:
            reductions["read"] = reading
        took = {name: _seconds(run, device) for name, run in reductions.items()}
        fastest = min(took, key=lambda name: took[name])
        more = 2 * nbytes
        if took[fastest] >= SHORTEST_READ or more > min(MOST_READ_BYTES, device.memory_stats().free // 8):
            contender = Contender("read", reductions[fastest], lambda: None)
            return Probe(contender, buffer.nbytes, f"{fastest} of {buffer.nbytes >> 20} MiB")
        nbytes = more


def _reductions(buffer: Tensor) -> dict[str, Callable[[], object]]:
    return {"sum": buffer.sum, "max": buffer.max, "norm": lambda: torch.linalg.vector_norm(buffer)}


def matmul_probe(device: Device, dtype: torch.dtype) -> Probe:
    """Return a probe that multiplies at the device's highest rate, or else square matrices of the fastest size."""
    best: Probe | None = None
    fastest = 0.0
    for size in MATMUL_SIZES:
        left, right = (torch.randn(size, size).to(device.torch, dtype) for _ in range(2))
        run = _multiplying(left, right)
        took = _seconds(run, device)
        if 2 * size**3 / took > fastest:
            fastest = 2 * size**3 / took
            description = f"matmul {size} x {size} x {size} in {str(dtype).removeprefix('torch.')}"
            best = Probe(Contender("matmul", run, lambda: None), 2 * size**3, description)
        if took > LONGEST_TRIAL:
            break
    assert best is not None
    if (peak := device.multiplying(dtype)) is None:
        return best
    multiply, operations = peak
    reached = fastest * _seconds(multiply, device) / operations
    if reached > 1:  # torch has instructions that the driver does not
        return best
    description = f"products in registers, of which {best.description} reaches {reached:.0%}"
    return Probe(Contender("multiply", multiply, lambda: None), operations, description)


def _multiplying(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.inference_mode():
            return functional.linear(left, right)

    return run


def _seconds(run: Callable[[], object], device: Device) -> float:
    """Return the fastest duration of three runs after a warm-up."""
    took = []
    for _ in range(4):
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        took.append(time.perf_counter() - start)
    return min(took[1:])
