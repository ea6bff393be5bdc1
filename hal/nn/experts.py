"""The experts of a mixture: the projections of all experts as one layer, and their gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor, nn

from hal import ops
from hal.config.settings import ExpertsMode
from hal.device.group import Group
from hal.errors import ConfigError
from hal.nn.expert_parallel import ExpertExchange, exchange_of
from hal.nn.linear import EXPERTS, IN, OUT, Projection
from hal.nn.lora import Lora, slots_of_experts
from hal.nn.mlp import GATED_ACTIVATIONS, ActivationName, Function
from hal.nn.weights.assembly import MergedTransposed
from hal.nn.weights.weight import EQUALLY, Consumer, Share, Weight
from hal.parallel.mesh import Mesh


class GroupedLinear(Projection):
    """:func:`hal.ops.grouped_linear`: one projection per expert.

    In the checkpoint, an expert is a module beside this layer, which has a number and the parts:
    ``3.gate_proj.weight``. Or one tensor, with the name of this layer, has the weights of all experts, and another
    one, such as ``gate_up_proj_bias``, their biases.

    Args:
        num_experts: the number of experts.
        in_features: features of the input.
        parts: the out_features of each part of an expert, in order, by its name in the checkpoint.
        bias: whether it has a bias.
        shard: the axis along which the ranks of a layer may split each expert, ``out_features`` or ``in_features``, or
            None. A layer above adds their results, as :class:`Experts` does. With ``num_experts``, ranks hold whole
            experts.
        share: how ranks share that axis.
        transposed: the layer's own name, if the checkpoint has one tensor ``[num_experts, in_features, out_features]``
            of that name for all experts; else None.
        by_shape: whether a tensor of that name that has the shape of ``weight`` is not transposed.

    Attributes:
        weight: ``[num_experts, out_features, in_features]``.
        bias: ``[num_experts, out_features]``, or None.
        fused: the layer's own name, if the checkpoint has one tensor of that name for all experts; else None.
        lora: the adapters that change its output; None for none.
    """

    operation = "grouped_linear"
    lora: Lora | None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        shard: str | None = None,
        share: Share = EQUALLY,
        transposed: str | None = None,
        by_shape: bool = False,
    ) -> None:
        out_features = sum(parts.values())
        super().__init__(in_features, out_features, parts=parts, shard=shard, share=share, num_experts=num_experts)
        self.fused, self.transposed, self.by_shape = transposed, transposed is not None, by_shape
        self.lora = None
        weight = torch.empty(num_experts, out_features, in_features)
        self.weight = nn.Parameter(weight, requires_grad=False)
        values = nn.Parameter(torch.empty(num_experts, out_features), requires_grad=False) if bias else None
        self.register_parameter("bias", values)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations of its tensors."""
        if self.quantized:
            return self.kept
        weight = self.declare("weight", consumer=Consumer("grouped_linear", "weight"), fused=self.fused)
        if self.transposed:
            weight = attrs.evolve(weight, assemble=MergedTransposed(OUT, tuple(self.parts.values())))
        fused, consumer = f"{self.fused}_bias" if self.fused else None, Consumer("grouped_linear", "bias")
        return {"weight": weight, "bias": self.declare("bias", OUT, added=True, fused=fused, consumer=consumer)}

    def forward(self, x: Tensor, counts: Tensor, slots: Tensor | None = None) -> Tensor:
        """Map ``[assignments, in_features]``, sorted by expert, to ``[assignments, out_features]``.

        Args:
            x: the rows.
            counts: the number of rows of each expert, int64 ``[num_experts]``. Rows beyond their sum are unspecified.
            slots: the slot of the adapter of each row, as :meth:`Experts.forward` finds it; None for no adapters.
        """
        output = self.product(x, counts)
        return output if self.lora is None or slots is None else self.lora(output, x, slots)

    def product(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return the product with the weights, without adapters."""
        if not self.quantized:
            return ops.grouped_linear(x, self.weight, counts, self.bias)
        if self.form.ordered and self.input_order is not None:
            owner = (torch.arange(x.shape[0], device=x.device).unsqueeze(-1) >= counts.cumsum(0)).sum(-1)
            x = self.gathered(x).gather(-1, self.input_order[owner.clamp(max=self.input_order.shape[0] - 1)])
        x, x_scale, dtype = self.rounded(x)
        given = self.weight_scale, self.weight_zero_point
        return ops.grouped_linear(x, self.weight, counts, self.bias, *given, x_scale, dtype, self.form)

    if TYPE_CHECKING:
        __call__ = forward


class Experts(nn.Module):
    """The gated MLPs of several experts: ``down(activation(gate(x)) * up(x))`` for each token's experts.

    Args:
        num_experts: the number of experts.
        hidden_size: features of the input and of the output.
        width: features between the projections, for each expert.
        names: the checkpoint's names of the gate, up and down projections of an expert.
        activation: as in :class:`GatedMLP`.
        bias: whether the projections have biases.
        interleaved: whether the rows of gate and up alternate in one projection. The activation takes them so.
        transposed: whether the checkpoint has ``[num_experts, in_features, out_features]`` for all experts; see
            :class:`GroupedLinear`.
        by_shape: see :class:`GroupedLinear`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        activation: ActivationName | Function = "silu",
        bias: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        by_shape: bool = False,
    ) -> None:
        super().__init__()
        gate, up, down = names
        parts, share = ({gate: 2 * width}, Share(unit=2)) if interleaved else ({gate: width, up: width}, EQUALLY)
        stored = ("gate_up_proj", "down_proj") if transposed else (None, None)
        self.activation = GATED_ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.num_experts = num_experts
        self.group: str | None = None
        self.exchange: ExpertExchange | None = None
        self.gate_up_proj = GroupedLinear(
            num_experts, hidden_size, parts, bias=bias, shard=OUT, share=share, transposed=stored[0], by_shape=by_shape
        )
        self.down_proj = GroupedLinear(
            num_experts, width, {down: hidden_size}, bias=bias, shard=IN, transposed=stored[1], by_shape=by_shape
        )

    def split(self, tensor: Group) -> None:
        """Compute this rank's part of every expert from now on, and add the ranks' results."""
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
            weights: ``[tokens, top_k]``: the weight of each of a token's experts, in hidden's dtype or float32.
            experts: ``[tokens, top_k]``, int32.
        """
        if self.exchange is not None:
            return self.exchange(self._compute, hidden, weights, experts)
        rows, counts, positions = ops.expert_permute(hidden, experts, self.num_experts)
        adapted = self.gate_up_proj.lora is not None
        slots = slots_of_experts(experts, positions, self.num_experts) if adapted else None
        output = ops.expert_unpermute(self._compute(rows, counts, slots), positions, weights)
        return output if self.group is None else ops.all_reduce(output, self.group)

    def _compute(self, rows: Tensor, counts: Tensor, slots: Tensor | None = None) -> Tensor:
        adapted = () if slots is None else (slots,)  # a driver's layer may have none
        return self.down_proj(self.activation(self.gate_up_proj(rows, counts, *adapted)), counts, *adapted)

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
