"""The experts that a batch chooses, by which the floor counts their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor, nn

from hal import ops
from hal.bench.bench_errors import BenchmarkError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel

EXPERTS = "num_experts"
"""Axis of the declared weights that hold one matrix per expert."""


@attrs.frozen
class Routing:
    """The choice of a sparse layer for a batch.

    Attributes:
        experts: number of distinct experts chosen.
        assignments: number of pairs of a token and one of its experts.
    """

    experts: int
    assignments: int


@contextmanager
def recorded() -> Iterator[list[Routing]]:
    """Record each choice of experts inside the block, in order; the list is complete at the end of the block."""
    chosen: list[Tensor] = []
    found: list[Routing] = []

    def wrap(operation: Operation, kernel: Kernel) -> Kernel:
        if operation.name != "topk_route":
            return kernel

        def recording(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            chosen.append(result[1])
            return result

        return recording

    with ops.intercepted(wrap):
        yield found
    found.extend(Routing(each.unique().numel(), each.numel()) for each in chosen)


def expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with an axis ``num_experts``, in the order of layers."""
    return [
        getattr(layer, name)
        for layer in model.modules()
        for name, weight in getattr(layer, "weights", {}).items()
        if EXPERTS in weight.axes.split() and isinstance(getattr(layer, name), nn.Parameter)
    ]


def packed_weights(model: nn.Module) -> list[Tensor]:
    """Return the quantized weights, with their scales, except those of experts."""
    return [
        tensor
        for layer in model.modules()
        for name, weight in getattr(layer, "weights", {}).items()
        if EXPERTS not in weight.axes.split()
        and isinstance(tensor := getattr(layer, name), Tensor)
        and not isinstance(tensor, nn.Parameter)
    ]


def active_elements(model: nn.Module, routings: Sequence[Routing]) -> int:
    """Return the elements of the chosen experts' weights, each counted once.

    Raises:
        BenchmarkError: the sparse layers do not correspond to the routings.
    """
    return sum(_of_one(weight) * routing.experts for weight, routing in _routed(model, routings))


def assigned_elements(model: nn.Module, routings: Sequence[Routing]) -> int:
    """Return the elements of the chosen experts' weights, counted for each token that multiplies them.

    Raises:
        BenchmarkError: as for :func:`active_elements`.
    """
    return sum(_of_one(weight) * routing.assignments for weight, routing in _routed(model, routings))


def _of_one(weight: nn.Parameter) -> int:
    return math.prod(weight.shape[1:])


def _routed(model: nn.Module, routings: Sequence[Routing]) -> Iterator[tuple[nn.Parameter, Routing]]:
    """Yield each weight with its layer's routing: layers have equal numbers of weights, in order."""
    weights = expert_weights(model)
    if len(weights) % max(len(routings), 1) or bool(weights) != bool(routings):
        raise BenchmarkError(
            f"the model has {len(weights)} weights with the axis {EXPERTS}, but a step chose experts {len(routings)} "
            "times, so the floor cannot count the weights that it read",
            "call topk_route once in each sparse layer, and give each the same number of such weights",
        )
    for index, weight in enumerate(weights):
        yield weight, routings[index * len(routings) // len(weights)]
