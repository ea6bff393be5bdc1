"""Recurrent layers: the delta rule with npu_recurrent_gated_delta_rule where it applies, else composed.

Source: torch_npu's documentation of ``npu_recurrent_gated_delta_rule`` and ``npu_rms_norm``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from hal.errors import CaptureError
from hal.ops.kernels import composed_recurrence
from hal.ops.kernels.kernel_table import Kernel

from ..soc import Generation

if TYPE_CHECKING:
    from hal.nn import WeightUse

CONSTANTS = 256
"""The least size of a constant tensor."""
FUSED_QUERIES = 8
"""The most tokens of a sequence in npu_recurrent_gated_delta_rule."""
FUSED_HEADS, FUSED_DIM = 256, 256
"""Its most heads, and the most elements of a head."""


def kernels(device: torch.device, generation: Generation) -> dict[str, Kernel]:
    """Return the kernels by operation."""
    constants = Constants(device)
    rule = DeltaRule(constants, fuses=generation.delta_rule)
    return {
        "causal_conv1d": CausalConv(),
        "channel_delta_rule": rule,
        "delta_rule_gates": delta_rule_gates,
        "gated_delta_rule": rule,
        "gated_rms_norm": gated_rms_norm,
        "l2_norm": L2Norm(constants),
    }


class Constants:
    """Tensors with one value that kernels need again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[float, torch.dtype], Tensor] = {}

    def full(self, size: int, value: float, dtype: torch.dtype) -> Tensor:
        """Return a tensor of a size, a view of a larger one."""
        made = self._made.get((value, dtype))
        if made is None or len(made) < size:
            made = torch.full((max(size, CONSTANTS),), value, dtype=dtype, device=self._device)
            if not torch_npu.npu.is_current_stream_capturing():  # else its memory is the graph's
                self._made[value, dtype] = made
        return made[:size]


class CausalConv:
    """``causal_conv1d``, composed: CANN's own convolutions ignore the activation, or support other widths."""

    updates = False  # A decode reads no lengths on the host.

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor,
        read_slots: Tensor,
        write_slots: Tensor | None,
        query_start_loc: Tensor,
        query_start_loc_host: Tensor,
        silu: bool,
        dilation: int = 1,
    ) -> Tensor:
        """See :func:`hal.ops.causal_conv1d`. Products of two dtypes are in float32, up to SiLU."""
        queries = composed_recurrence.queries_each(x.shape[0], query_start_loc_host.tolist())
        if queries == 1 and write_slots is None and bias is None:
            rows = torch.cat((window.index_select(0, read_slots), x.unsqueeze(1)), 1)
            torch_npu.npu_scatter_nd_update_(window, read_slots.unsqueeze(1), rows[:, 1:])
            total = (rows[:, ::dilation] * weight.float()).sum(1)
            return (functional.silu(total) if silu else total).to(x.dtype)
        if queries is None:
            _refuse_in_capture()
        return composed_recurrence.causal_conv1d(
            x, weight, bias, window, read_slots, write_slots, query_start_loc, query_start_loc_host, silu, dilation
        )


def prepared(weights: Mapping[str, Tensor], use: WeightUse) -> Mapping[str, Tensor]:
    """Return the weight of a convolution in float32."""
    return {name: each.float() for name, each in weights.items()}


def delta_rule_gates(a: Tensor, b: Tensor, factor: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.delta_rule_gates`. The sum of two dtypes is in float32."""
    return functional.softplus(a + dt_bias) * factor, torch.sigmoid(b)


class DeltaRule:
    """``gated_delta_rule``: one launch for few tokens of each sequence with a state in bfloat16, else composed.

    ``channel_delta_rule`` is composed: CANN's operations have one decay for all channels of a key. CANN's
    npu_chunk_gated_delta_rule is not used: its documentation allows decays down to -1 only, and trained models have
    larger ones.

    Args:
        constants: of the device.
        fuses: whether the device has npu_recurrent_gated_delta_rule.
    """

    updates = False  # A decode reads no lengths on the host.

    def __init__(self, constants: Constants, *, fuses: bool) -> None:
        self._constants, self._fuses = constants, fuses

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        read_slots: Tensor,
        write_slots: Tensor | None,
        query_start_loc: Tensor,
        query_start_loc_host: Tensor,
        scale: float,
    ) -> Tensor:
        """See :func:`hal.ops.gated_delta_rule`, and, of decays with a third dimension, ``channel_delta_rule``."""
        by_channel = decay.dim() == 3
        starts: list[int] = query_start_loc_host.tolist()
        queries = composed_recurrence.queries_each(query.shape[0], starts)
        sizes = max(value.shape[1], key.shape[1]) <= FUSED_HEADS and max(*key.shape[2:], *value.shape[2:]) <= FUSED_DIM
        few = queries is not None and queries <= FUSED_QUERIES and query.shape[0] <= state.shape[0]
        fuses = self._fuses and not by_channel
        if fuses and write_slots is None and state.dtype is torch.bfloat16 and sizes and few:
            assert queries is not None
            sequences = read_slots.shape[0]
            lengths = self._constants.full(sequences, queries, torch.int32)
            return torch_npu.npu_recurrent_gated_delta_rule(  # type: ignore[no-any-return]
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                state,
                beta=beta.contiguous(),
                scale=scale,
                actual_seq_lengths=lengths,
                ssm_state_indices=read_slots if queries == 1 else read_slots.repeat_interleave(queries),
                num_accepted_tokens=self._constants.full(sequences, 1, torch.int32),
                g=decay,
            )
        if queries == 1 and write_slots is None and state.dtype is torch.float32 and not by_channel:
            return _decoded(query, key, value, decay, beta, state, read_slots, scale)
        saves = 1 if write_slots is None else write_slots.shape[1]
        if queries is None or queries > max(composed_recurrence.FEW, saves):
            _refuse_in_capture()
        given = query, key, value, decay, beta, state, read_slots, write_slots, query_start_loc, query_start_loc_host
        return composed_recurrence.delta_rule(*given, scale)


def _decoded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    scale: float,
) -> Tensor:
    """Advance every sequence by one token, with a state in float32. Products of two dtypes are in float32."""
    sequences, key_heads, key_dim = key.shape
    before = state.index_select(0, slots).mul_(decay.exp()[..., None, None])
    # The value heads of a key head become rows of one product.
    grouped = before.view(sequences, key_heads, -1, key_dim)
    wide = key.float().unsqueeze(-1)
    change = (value - (grouped @ wide).view(value.shape)) * beta.unsqueeze(-1)
    after = torch.addcmul(grouped, change.view(sequences, key_heads, -1, 1), wide.transpose(-1, -2))
    torch_npu.npu_scatter_nd_update_(state, slots.unsqueeze(1), after.view(before.shape))
    result = (after @ query.float().unsqueeze(-1)).view(value.shape)
    return torch.mul(result, scale, out=torch.empty_like(value, memory_format=torch.contiguous_format))


def _refuse_in_capture() -> None:
    if torch_npu.npu.is_current_stream_capturing():
        raise CaptureError(
            "the chunks of recurrent layers are arranged on the host, and a replay would not arrange them anew",
            "capture decode steps only, or split steps at causal_conv1d and gated_delta_rule, as piecewise does",
        )


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`hal.ops.gated_rms_norm`. It rounds the norm and the gate once more, within the tolerance."""
    normed: Tensor = torch_npu.npu_rms_norm(x, weight, eps)[0]
    return functional.silu(gate) * normed


class L2Norm:
    """``l2_norm`` as a root-mean-square norm with a constant weight: one launch."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """See :func:`hal.ops.l2_norm`."""
        width = x.shape[-1]
        weight = self._constants.full(width, 1.0 / math.sqrt(width), torch.float32)
        return torch_npu.npu_rms_norm(x, weight, eps / width)[0]  # type: ignore[no-any-return]
