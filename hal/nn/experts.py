"""Mixtures of experts: the projections of all experts as one layer, and the MLP that routes tokens to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.config.settings import ExpertsMode
from hal.device.group import Group
from hal.errors import ConfigError
from hal.nn.expert_parallel import ExpertExchange, exchange_of
from hal.nn.linear import EXPERTS, IN, OUT, Linear, Projection
from hal.nn.mlp import GATED_ACTIVATIONS, ActivationName, Function
from hal.nn.weights.weight import Consumer, Weight
from hal.parallel.mesh import Mesh

MAX_EXPERTS = 1 << 16
"""Each expert's tensors have names, which a damaged config must not multiply without limit."""


class GroupedLinear(Projection):
    """:func:`hal.ops.grouped_linear`: one projection per expert, without bias.

    In the checkpoint, an expert is a module beside this layer, which has a number and the parts:
    ``3.gate_proj.weight``. Or one tensor, with the name of this layer, has the weights of all experts.

    Args:
        num_experts: the number of experts.
        in_features: features of the input.
        parts: the out_features of each part of an expert, in order, by its name in the checkpoint.
        shard: the axis along which the ranks of a layer may split each expert, ``out_features`` or ``in_features``, or
            None. A layer above adds their results, as :class:`Experts` does. With ``num_experts``, ranks hold whole
            experts.

    Attributes:
        weight: ``[num_experts, out_features, in_features]``.
        fused: the layer's own name, if the checkpoint has that one tensor, like ``weight``; else None.
    """

    def __init__(
        self, num_experts: int, in_features: int, parts: Mapping[str, int], *, shard: str | None = None
    ) -> None:
        out_features = sum(parts.values())
        super().__init__(in_features, out_features, parts=parts, shard=shard, num_experts=num_experts)
        self.fused: str | None = None
        weight = torch.empty(num_experts, out_features, in_features)
        self.weight = nn.Parameter(weight, requires_grad=False)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        return {"weight": self.declare("weight", consumer=Consumer("grouped_linear", "weight"), fused=self.fused)}

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]``, sorted by expert, to ``[assignments, out_features]``.

        Args:
            x: the rows.
            counts: the number of rows of each expert, int64 ``[num_experts]``. Rows beyond their sum are unspecified.
        """
        return ops.grouped_linear(x, self.weight, counts)

    if TYPE_CHECKING:
        __call__ = forward


class Gate(Linear):
    """A small projection whose result routes or scales others, such as the scores of experts.

    It stays unquantized.
    """


class Experts(nn.Module):
    """The gated MLPs of several experts: ``down(activation(gate(x)) * up(x))`` for each token's experts.

    Args:
        num_experts: the number of experts.
        hidden_size: features of the input and of the output.
        width: features between the projections, for each expert.
        names: the checkpoint's names of the gate, up and down projections of an expert.
        activation: as in :class:`GatedMLP`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        activation: ActivationName | Function = "silu",
    ) -> None:
        super().__init__()
        gate, up, down = names
        self.activation = GATED_ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.num_experts = num_experts
        self.group: str | None = None
        self.exchange: ExpertExchange | None = None
        self.gate_up_proj = GroupedLinear(num_experts, hidden_size, {gate: width, up: width}, shard=OUT)
        self.down_proj = GroupedLinear(num_experts, width, {down: hidden_size}, shard=IN)

    def split(self, tensor: Group) -> None:
        """Compute this rank's part of every expert from now on, and add the ranks' results.

        Args:
            tensor: the ranks that split each layer.
        """
        if self.exchange is None:
            self.group = tensor.name

    def distribute(self, mode: ExpertsMode, mesh: Mesh) -> None:
        """Compute this rank's experts from now on, each of them whole. Called before ``split``.

        Args:
            mode: the way in which tokens reach the ranks of their experts, any but ``split``.
            mesh: its group ``expert`` has the ranks that share the experts.

        Raises:
            ConfigError: the ranks cannot hold equal numbers of experts, or a driver's layer computes all experts.
        """
        _check_exchanges(self)
        self.exchange = exchange_of(mode, self.num_experts, mesh)
        for projection in (self.gate_up_proj, self.down_proj):
            projection.shard = EXPERTS
            _check_shared(projection)

    def forward(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape.

        Args:
            hidden: the tokens.
            weights: ``[tokens, top_k]``: the weight of each of a token's experts.
            experts: ``[tokens, top_k]``, int32.
        """
        if self.exchange is not None:
            return self.exchange(self._compute, hidden, weights, experts)
        rows, counts, positions = ops.expert_permute(hidden, experts, self.num_experts)
        output = ops.expert_unpermute(self._compute(rows, counts), positions, weights)
        return output if self.group is None else ops.all_reduce(output, self.group)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(rows, counts)), counts)

    if TYPE_CHECKING:
        __call__ = forward


def _check_exchanges(layer: Experts) -> None:
    """Raise ConfigError for a subclass whose ``forward`` does not know of ``exchange``."""
    kind = type(layer)
    if kind.forward is not Experts.forward and kind.distribute is Experts.distribute:
        raise ConfigError(
            f"ranks cannot share the experts of {kind.__name__}, whose forward replaces that of hal.nn.Experts",
            'set parallel.experts to "split"; or let forward call `exchange`, if it is set, and override `distribute`, '
            "which may only call that of Experts, to say so",
        )


def _check_shared(projection: nn.Module) -> None:
    """Raise ConfigError unless a projection declares that ranks share its experts."""
    declared: Mapping[str, Weight] = getattr(projection, "weights", {})
    stacked = [each.group for each in declared.values() if EXPERTS in each.names]
    if not stacked or "tensor" in stacked:
        raise ConfigError(
            f"ranks cannot share the experts of {type(projection).__name__}, which does not declare its weight to be "
            "shared by experts",
            'set parallel.experts to "split", or declare the weight as hal.nn.GroupedLinear does',
        )


class SparseMLP(nn.Module):
    """A softmax router and its experts, each token's results weighted by its scores.

    Args:
        hidden_size: features of the input and of the output.
        width: features between an expert's projections.
        num_experts: the number of experts.
        top_k: the number of experts per token.
        renormalize: whether the weights of a token add up to 1.
        names: see :class:`Experts`.
        activation: as in :class:`GatedMLP`.

    Raises:
        ConfigError: the numbers of experts are out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        activation: ActivationName | Function = "silu",
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                f"config.json chooses {top_k} experts per token of {num_experts}",
                f"correct num_experts_per_tok: it is from 1 to the number of experts, {num_experts}",
            )
        if num_experts > MAX_EXPERTS:
            raise ConfigError(
                f"config.json has {num_experts} experts, more than {MAX_EXPERTS}", "correct the number of experts"
            )
        self.top_k, self.renormalize = top_k, renormalize
        self.gate = Gate(hidden_size, num_experts)
        self.experts = Experts(num_experts, hidden_size, width, names=names, activation=activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[tokens, hidden_size]`` to the same shape."""
        weights, experts = ops.topk_route(
            self.gate(hidden),
            None,
            self.top_k,
            sigmoid=False,
            renormalize=self.renormalize,
            scale=1.0,
            num_groups=1,
            top_groups=1,
            group_best=1,
        )
        return self.experts(hidden, weights, experts)

    if TYPE_CHECKING:
        __call__ = forward
