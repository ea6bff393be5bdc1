"""The adapters (LoRA) of a projection, in the slots of stacked tensors, and the slots of a step's tokens."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hal import ops
from hal.ops.lora import NO_ADAPTER

STEP_SLOTS: ContextVar[Tensor | None] = ContextVar("hal_adapter_slots", default=None)
"""The slot of each token in the step that this thread runs or traces."""


class Lora(nn.Module):
    """What the adapters of a step's tokens add to the output of a projection.

    The tensors keep their addresses, so that captured steps use what they hold. An empty slot is zero.

    Args:
        slots: the most adapters; for projections of experts, times the experts.
        num_parts: the projections of the checkpoint that are merged, each of which has an A.
        rank: the largest rank.
        in_features: features of the input on this rank.
        parts: the part and length of each run of the output's features on this rank; see :func:`hal.ops.add_lora`.
        out_features: features of the output on this rank.
        dtype: of the computation.
        device: where the projection is.

    Attributes:
        lora_a: ``[slots, num_parts, rank, in_features]``.
        lora_b: ``[slots, rank, out_features]``, times the adapter's scale.
    """

    lora_a: Tensor
    lora_b: Tensor

    def __init__(
        self,
        slots: int,
        num_parts: int,
        rank: int,
        in_features: int,
        parts: str,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.register_buffer("lora_a", torch.zeros(slots, num_parts, rank, in_features, dtype=dtype, device=device))
        self.register_buffer("lora_b", torch.zeros(slots, rank, out_features, dtype=dtype, device=device))

    def forward(self, output: Tensor, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """Return the projection's output with what the tokens' adapters add. Outside of a step, it stays as it is.

        Args:
            output: ``[tokens, ..., out_features]``.
            x: ``[tokens, ..., in_features]``.
            slots: ``[tokens]``, int32; None for those of the step.
        """
        slots = STEP_SLOTS.get() if slots is None else slots
        if slots is None:
            return output
        if x.dim() == 2:
            return ops.add_lora(output, x, self.lora_a, self.lora_b, slots, self.parts)
        each = slots.view(-1, *[1] * (x.dim() - 2)).expand(x.shape[:-1]).flatten()
        flat = output.flatten(0, -2), x.flatten(0, -2)
        return ops.add_lora(*flat, self.lora_a, self.lora_b, each, self.parts).view(output.shape)

    if TYPE_CHECKING:
        __call__ = forward


def slots_of_experts(experts: Tensor, positions: Tensor, num_experts: int) -> Tensor | None:
    """Return the slot of each row that is sorted by expert: that of the row's token, for the row's expert.

    Args:
        experts: ``[tokens, top_k]``, int32.
        positions: of :func:`hal.ops.expert_permute`.
        num_experts: each slot of a token has so many, one for each expert.

    Returns:
        ``[tokens * top_k]``, int32; None outside of a step.
    """
    slots = STEP_SLOTS.get()
    if slots is None:
        return None
    each = (slots[:, None] * num_experts + experts).masked_fill(slots[:, None] < 0, NO_ADAPTER)
    return torch.empty_like(positions).scatter(0, positions.long(), each.flatten())


def begin_step(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Give the slots of a step's tokens to the projections of ``model(batch, states)``: a hook before the call."""
    STEP_SLOTS.set(arguments[0].adapter_slots)


def end_step(model: nn.Module, arguments: tuple[Any, ...], found: Any) -> None:
    """End what :func:`begin_step` began: a hook after the call, also if it raises."""
    STEP_SLOTS.set(None)
