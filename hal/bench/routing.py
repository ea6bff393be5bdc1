"""The experts that a batch chooses, by which the floor counts their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.bench.plan import BenchmarkError
from hal.nn.weights.weight import Weight
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel

ROUTES = ("softplus_route", "topk_route")
"""The operations that choose the experts of tokens, as their second results."""
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
        if operation.name not in ROUTES:
            return kernel

        def recording(*args: Any, **kwargs: Any) -> Any:
            result = kernel(*args, **kwargs)
            chosen.append(result[1])
            return result

        return recording

    with ops.intercepted(wrap):
        yield found
    found.extend(Routing(each.unique().numel(), each.numel()) for each in chosen)


@attrs.frozen(eq=False)
class ExpertTensor:
    """A tensor of a projection of experts.

    Attributes:
        tensor: the tensor, without values.
    """

    name: str
    tensor: Tensor
    declared: Weight

    @property
    def numbers(self) -> int:
        """The numbers of an expert's matrix; 0 for a scale, a zero point or a bias."""
        if self.tensor.dim() < 3 or self.declared.group_sizes:
            return 0
        found = math.prod(self.tensor.shape[1:])
        for axis in self.declared.packing:
            count, elements = self.declared.numbers(axis)
            found = found * count // elements
        return found


def expert_projections(model: nn.Module) -> dict[str, list[ExpertTensor]]:
    """Return the tensors with an axis ``num_experts`` of each layer that has any, by its path, in the model's order."""
    found = {
        path: [
            ExpertTensor(name, tensor, weight)
            for name, weight in getattr(layer, "weights", {}).items()
            if EXPERTS in weight.names and isinstance(tensor := getattr(layer, name), Tensor)
        ]
        for path, layer in model.named_modules()
    }
    return {path: tensors for path, tensors in found.items() if tensors}


def expert_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters with an axis ``num_experts``, in the order of layers."""
    found = (each.tensor for tensors in expert_projections(model).values() for each in tensors)
    return [each for each in found if isinstance(each, nn.Parameter)]


def packed_weights(model: nn.Module) -> list[Tensor]:
    """Return the quantized weights, with their scales, except those of experts."""
    return [
        tensor
        for layer in model.modules()
        for name, weight in getattr(layer, "weights", {}).items()
        if EXPERTS not in weight.names
        and isinstance(tensor := getattr(layer, name), Tensor)
        and not isinstance(tensor, nn.Parameter)
    ]


def active_bytes(
    model: nn.Module, dtype: torch.dtype, routings: Sequence[Routing], loaded: nn.Module | None = None
) -> int:
    """Return the bytes of the chosen experts' tensors, each counted once.

    Args:
        model: without values.
        routings: the choice of experts in each sparse layer.
        loaded: the model with its values, whose quantized weights are counted as they are held; None for the model.

    Raises:
        BenchmarkError: the sparse layers do not correspond to the routings.
    """
    layers, found = dict((loaded or model).named_modules()), 0
    for path, tensors, routing in _routed(model, routings):
        for each in tensors:
            held = getattr(layers.get(path), each.name, each.tensor)
            if held is not None:  # a zero point that is 0
                itemsize = (dtype if each.declared.dtype is None else held.dtype).itemsize
                found += math.prod(each.tensor.shape[1:]) * itemsize * routing.experts
    return found


def assigned_numbers(model: nn.Module, routings: Sequence[Routing], *, quantized: bool = True) -> int:
    """Return the numbers of the chosen experts' matrices, counted for each token that multiplies them.

    Args:
        model: without values.
        routings: the choice of experts in each sparse layer.
        quantized: whether quantized matrices count.

    Raises:
        BenchmarkError: as for :func:`active_bytes`.
    """
    return sum(
        each.numbers * routing.assignments
        for _, tensors, routing in _routed(model, routings)
        for each in tensors
        if quantized or each.tensor.is_floating_point()
    )


def _routed(model: nn.Module, routings: Sequence[Routing]) -> Iterator[tuple[str, list[ExpertTensor], Routing]]:
    """Yield each projection's path and tensors with its layer's routing: layers have equal numbers of projections."""
    projections = expert_projections(model)
    if len(projections) % max(len(routings), 1) or bool(projections) != bool(routings):
        raise BenchmarkError(
            f"the model has {len(projections)} projections with the axis {EXPERTS}, but a step chose experts "
            f"{len(routings)} times, so the floor cannot count the weights that it read",
            f"call {' or '.join(ROUTES)} once in each sparse layer, and give each the same number of such projections",
        )
    for index, (path, tensors) in enumerate(projections.items()):
        yield path, tensors, routings[index * len(routings) // len(projections)]
