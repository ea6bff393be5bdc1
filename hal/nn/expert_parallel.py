"""Whole experts on each rank: how tokens reach their experts, and how the results return.

All ranks of a mesh hold different experts, in equal numbers. The ranks of a tensor group have the same tokens, and all
ranks have the same number of tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.config.settings import ExpertsMode
from hal.errors import ConfigError
from hal.ops.experts.dispatch import combined, dispatched, from_digits, to_digits
from hal.parallel.mesh import Mesh

Compute = Callable[[Tensor, Tensor], Tensor]
"""Maps rows sorted by this rank's experts, and the number of rows of each, to the experts' results."""


@attrs.frozen
class ExpertExchange(ABC):
    """The base of the ways in which tokens reach the ranks of their experts.

    Attributes:
        num_experts: the number of experts of all ranks.
        mesh: the ranks.
    """

    num_experts: int
    mesh: Mesh

    @property
    def local_experts(self) -> int:
        """The number of experts of each rank."""
        return self.num_experts // self.mesh.expert.size

    @abstractmethod
    def __call__(self, compute: Compute, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts.

        Args:
            compute: computes this rank's experts.
            hidden: this rank's tokens, ``[tokens, hidden_size]``.
            weights: ``[tokens, top_k]``, of hidden's dtype, or float32.
            experts: ``[tokens, top_k]``, int32.
        """


class AllGather(ExpertExchange):
    """Each rank computes its experts for the tokens of all ranks, and the ranks add their results."""

    def __call__(self, compute: Compute, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tensor, data, local = self.mesh.tensor, self.mesh.data, self.local_experts
        if data.size > 1:
            hidden, weights, experts = _of_all(data.name, hidden, weights, experts)
        # All experts of other ranks count as one more, whose rows come last.
        kinds = (experts - self.mesh.expert.rank * local).remainder(self.num_experts).clamp(max=local)
        rows, counts, positions = ops.expert_permute(hidden, kinds, local + 1)
        counts = counts[:local]
        unspecified = torch.arange(rows.shape[0], device=rows.device) >= counts.sum()
        computed = compute(rows, counts).masked_fill(unspecified.unsqueeze(-1), 0.0)
        output = ops.expert_unpermute(computed, positions, weights)
        if data.size > 1:
            output = ops.reduce_scatter(output, data.name)
        return ops.all_reduce(output, tensor.name) if tensor.size > 1 else output


def _of_all(group: str, hidden: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of all ranks of a group, with one collective."""
    top_k = experts.shape[1]
    # The bits of wider weights are several numbers of hidden's dtype.
    wide = weights.dtype is not hidden.dtype
    sent = weights.contiguous().view(hidden.dtype) if wide else weights
    message = torch.cat([hidden, sent, *to_digits(experts, hidden.dtype)], -1)
    parts = [hidden.shape[1], sent.shape[1], top_k, top_k]
    hidden, sent, high, low = ops.all_gather_rows(message, group).split(parts, -1)
    return hidden, sent.contiguous().view(weights.dtype) if wide else sent, from_digits(high, low)


class AllToAll(ExpertExchange):
    """Each token is sent to the ranks of its experts, and their results are sent back.

    The ranks of a tensor group each send a part of their tokens, and then exchange the results.
    """

    def __call__(self, compute: Compute, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tensor = self.mesh.tensor
        tokens: Any = hidden.shape[0]
        if tensor.size == 1:
            return self._exchange(compute, hidden, weights, experts)
        part = (tokens + tensor.size - 1) // tensor.size
        if isinstance(tokens, torch.SymInt):
            part = torch.sym_max(part, 2)  # A traced size stands for any number from two on.
        # The last token fills the parts that are too short. Indices, unlike slices, put no condition on traced sizes.
        own = (torch.arange(part, device=hidden.device) + tensor.rank * part).clamp(max=tokens - 1)
        output = self._exchange(compute, *(each.index_select(0, own) for each in (hidden, weights, experts)))
        gathered = ops.all_gather_rows(output, tensor.name)
        return gathered.index_select(0, torch.arange(tokens, device=hidden.device))

    def _exchange(self, compute: Compute, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        group = self.mesh.expert
        rows, counts, sent, received = dispatched(hidden, experts, self.num_experts, group.name, group.size)
        return combined(compute(rows, counts), weights, sent, received, group.name)


class Dispatch(AllToAll):
    """As :class:`AllToAll`, by the operations that drivers may have better kernels for."""

    def _exchange(self, compute: Compute, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        group = self.mesh.expert.name
        rows, counts, sent, received = ops.expert_dispatch(hidden, experts, self.num_experts, group)
        return ops.expert_combine(compute(rows, counts), experts, weights, sent, received, self.num_experts, group)


EXCHANGES: Mapping[ExpertsMode, type[ExpertExchange]] = MappingProxyType(
    {"all_gather": AllGather, "all_to_all": AllToAll, "dispatch": Dispatch}
)
"""The ways by the value of ``parallel.experts``."""


def exchange_of(mode: ExpertsMode, num_experts: int, mesh: Mesh) -> ExpertExchange:
    """Return the exchange of a configuration.

    Raises:
        ConfigError: the ranks cannot hold equal numbers of experts.
    """
    ranks = mesh.expert.size
    if num_experts % ranks:
        raise ConfigError(
            f"{ranks} ranks cannot hold {num_experts} experts in equal numbers",
            f'choose a number of ranks that divides {num_experts}, or set parallel.experts to "split"',
        )
    return EXCHANGES[mode](num_experts, mesh)
