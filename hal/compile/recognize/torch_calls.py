"""Calls of torch that are one of hal's operations, such as linear and scaled_dot_product_attention.

They are replaced while a graph is traced, before the dispatcher turns them into a device's overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hal import ops
from hal.compile.rewrite_report import PassReport
from hal.drivers.backend import Backend
from hal.ops.kernels.kernel_table import Kernel


class NotAnOperation(Exception):
    """A call's arguments are not those of the operation; the message is the reason."""


class TorchCalls(TorchFunctionMode):
    """Replaces torch's calls by hal's operations while a function runs, and counts them.

    Args:
        backend: whose kernels decide which operations are used.
        disabled: names of operations that are not.

    Attributes:
        weights: the weights and biases of linear, by id. hal's own models call hal.ops, and are not among them.
    """

    def __init__(self, backend: Backend, disabled: Sequence[str] = ()) -> None:
        super().__init__()
        names = [name for name in RECOGNIZED if name in backend.kernels and name not in disabled]
        self._matches: dict[str, list[str]] = {name: [] for name in names}
        self._near_misses: dict[str, list[str]] = {name: [] for name in names}
        self._by_function = {RECOGNIZED[name][0]: name for name in names}
        self.weights: dict[int, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = self._by_function.get(func)
        if name is not None:
            place = f"{name}_{len(self._matches[name]) + len(self._near_misses[name])}"
            try:
                result = RECOGNIZED[name][1](*args, **(kwargs or {}))
            except NotAnOperation as reason:
                self._near_misses[name].append(f"at {place}: {reason}")
            else:
                self._matches[name].append(place)
                if name == "linear":
                    self.weights |= {id(each): each for each in (*args[1:], *(kwargs or {}).values())}
                return result
        return func(*args, **(kwargs or {}))

    @property
    def reports(self) -> tuple[PassReport, ...]:
        """The reports, one for each operation: they have no time of their own, being part of the trace."""
        return tuple(
            PassReport(name, tuple(self._matches[name]), tuple(self._near_misses[name]), 0.0) for name in self._matches
        )


def _call(name: str, *arguments: Any) -> Tensor:
    operation = ops.operation(name)
    unmet = operation.constraints.unmet(arguments)
    if unmet is not None:
        raise NotAnOperation(unmet)
    result: Tensor = operation.node(*arguments)
    return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - torch's name
    # Two dimensions, so that what splits the result finds a plain projection.
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    projected = _call("linear", rows, weight, bias)
    return projected if input.dim() == 2 else projected.view(*input.shape[:-1], weight.shape[0])


def _embedding(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None:
        raise NotAnOperation(f"max_norm is {max_norm}, which changes the weight")
    rows = _call("embedding", input.reshape(-1), weight)
    return rows.view(*input.shape, weight.shape[1])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p:
        raise NotAnOperation(f"dropout_p is {dropout_p}")
    if query.dim() != 4:
        raise NotAnOperation(f"query has {query.dim()} dimensions instead of 4")
    queries, keys = query.shape[2], key.shape[2]
    if is_causal and queries != keys:
        # torch aligns the first query with the first key, the operation the last with the last.
        raise NotAnOperation(f"is_causal, with {queries} queries and {keys} keys")
    # Sizes that torch requires to be equal may have symbols of their own, such as the lengths of a cache's tensors.
    # Comparing them makes Dynamo guard them.
    sizes = [(key.shape[0], query.shape[0]), (value.shape[0], query.shape[0]), (value.shape[2], keys)]
    if attn_mask is not None and attn_mask.dim() == 4:
        sizes += [(attn_mask.shape[2], queries), (attn_mask.shape[3], keys)]
    if any(bool(one != other) for one, other in sizes):
        raise NotAnOperation("arguments are broadcast")
    if attn_mask is not None and attn_mask.dtype is torch.bool and attn_mask.dim() == 4:
        attn_mask = attn_mask.expand(query.shape[0], *attn_mask.shape[1:])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _call("scaled_dot_product_attention", query, key, value, attn_mask, scale, is_causal)


def _layer_norm(
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(normalized_shape) != 1 or weight is None:
        raise NotAnOperation("it has no weight, or normalizes several dimensions")
    return _call("layer_norm", input, weight, bias, eps)


RECOGNIZED: Mapping[str, tuple[Callable[..., Any], Kernel]] = {
    "embedding": (functional.embedding, _embedding),
    "layer_norm": (functional.layer_norm, _layer_norm),
    "linear": (functional.linear, _linear),
    "scaled_dot_product_attention": (functional.scaled_dot_product_attention, _attention),
}
"""By operation: the function of torch, and what replaces it."""
