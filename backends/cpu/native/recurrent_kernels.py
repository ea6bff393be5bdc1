"""Python bindings of the C++ kernels of recurrent layers, and of other states per sequence."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from hal.errors import OperationError

from .arguments import DTYPES, Bindings, addresses, empty, integers, require, rows

RECURRENT_KERNELS = (
    "causal_conv1d",
    "channel_delta_rule",
    "delta_rule_gates",
    "gated_delta_rule",
    "gated_rms_norm",
    "l2_norm",
    "pool_groups",
)
WIDEST = 16
"""Rows that the convolution can keep."""


class RecurrentKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        function = self.function
        pointers, sizes = [c_void_p] * 10, [c_int64] * 8
        self._conv = function("causal_conv1d", c_int64, *pointers[:8], c_int, c_int, *sizes)
        self._delta = function("gated_delta_rule", c_int64, *pointers, *[c_int] * 3, *[c_int64] * 15, c_float)
        self._gates = function("delta_rule_gates", None, *pointers[:6], c_int, *sizes[:4])
        self._pool = function("pool_groups", c_int64, *pointers[:9], c_int, c_int, *sizes, c_int64)
        self._l2 = function("l2_norm", None, *pointers[:2], c_int, *sizes[:5], c_float)
        self._gated = function("gated_rms_norm", None, *pointers[:4], c_int, c_int, *sizes[:7], c_float)

    def causal_conv1d(
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
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.causal_conv1d`. A task has some channels of a sequence, with all its tokens.

        Raises:
            OperationError: a slot is outside the state, or shapes or dtypes differ.
        """
        written, saves = _written(read_slots, write_slots)
        (tokens, channels), width = x.shape, weight.shape[0]
        kept_rows = (width - 1) * dilation
        fits = weight.shape == (width, channels) and weight.dtype is window.dtype is x.dtype
        fits = fits and 1 <= kept_rows <= WIDEST and dilation >= 1
        fits = fits and window.shape[1:] == (kept_rows, channels) and window.is_contiguous()
        fits = fits and (bias is None or (bias.shape == (channels,) and bias.dtype is x.dtype))
        fits = fits and _same_sequences(read_slots, written, saves, query_start_loc)
        require(fits, "causal_conv1d", x, weight, window, indices=(read_slots, written, query_start_loc))
        x, (_, stride, _) = rows(x)
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        read_slots, written, starts = (each.contiguous() for each in (read_slots, written, query_start_loc))
        y = empty(x.shape, x) if out is None else out
        sizes = tokens, read_slots.shape[0], saves, window.shape[0], channels, width, dilation, stride
        wrong = self._conv(
            *addresses(x, weight, bias, window, read_slots, written, starts, y), DTYPES[x.dtype], silu, *sizes
        )
        _check("causal_conv1d", wrong, read_slots, written, starts, window.shape[0])
        return y

    def gated_delta_rule(
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
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.gated_delta_rule`. A task has one value head of a sequence, with all its tokens.

        Decays with a third dimension are those of :func:`hal.ops.channel_delta_rule`.

        Raises:
            OperationError: a slot is outside the state, or shapes or dtypes differ.
        """
        channels = decay.shape[2:]
        name = "channel_delta_rule" if channels else "gated_delta_rule"
        written, saves = _written(read_slots, write_slots)
        (tokens, key_heads, key_dim), (_, heads, value_dim) = query.shape, value.shape
        fits = key.shape == query.shape and value.shape[0] == tokens and heads % key_heads == 0
        fits = fits and beta.shape == decay.shape[:2] == (tokens, heads) and decay.dtype is torch.float32
        fits = fits and channels in ((), key.shape[2:])
        fits = fits and state.shape[1:] == (heads, value_dim, key_dim) and state.is_contiguous()
        fits = fits and key.dtype is value.dtype is beta.dtype is query.dtype
        fits = fits and state.dtype in (torch.float32, query.dtype)
        fits = fits and _same_sequences(read_slots, written, saves, query_start_loc)
        tensors, indices = (query, key, value, decay, beta, state), (read_slots, written, query_start_loc)
        require(fits, name, *tensors, indices=indices)
        query, (_, *query_strides) = rows(query)
        key, (_, *key_strides) = rows(key)
        value, (_, *value_strides) = rows(value)
        beta, (_, beta_stride, _) = rows(beta)
        decay = decay.contiguous()
        read_slots, written, starts = (each.contiguous() for each in indices)
        y = empty(value.shape, value) if out is None else out
        strides = (*query_strides, *key_strides, *value_strides, beta_stride)
        sizes = tokens, read_slots.shape[0], saves, state.shape[0], key_heads, heads, key_dim, value_dim, *strides
        wrong = self._delta(
            *addresses(query, key, value, decay, beta, state, read_slots, written, starts, y),
            DTYPES[query.dtype],
            state.dtype is torch.float32,
            len(channels),
            *sizes,
            scale,
        )
        _check(name, wrong, read_slots, written, starts, state.shape[0])
        return y

    channel_delta_rule = gated_delta_rule

    def pool_groups(
        self,
        x: Tensor,
        gate: Tensor | None,
        bias: Tensor | None,
        tail: Tensor,
        read_slots: Tensor,
        write_slots: Tensor | None,
        query_start_loc: Tensor,
        kv_lens: Tensor,
        group: int,
        span: int = 1,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.pool_groups`.

        Raises:
            OperationError: a slot is outside the state, or shapes or dtypes differ.
        """
        written, saves = _written(read_slots, write_slots)
        (tokens, features), (sequences,) = x.shape, read_slots.shape
        fits = features % span == 0 and kv_lens.shape == (sequences,)
        fits = fits and _same_sequences(read_slots, written, saves, query_start_loc)
        fits = fits and (gate is None or (gate.shape == x.shape and gate.dtype is x.dtype))
        fits = fits and tail.shape[1:] == (span * group, features * (1 if gate is None else 2))
        fits = fits and tail.dtype is x.dtype and tail.is_contiguous()
        fits = fits and (bias is None or (bias.shape == (group, features) and bias.dtype in (torch.float32, x.dtype)))
        fits = fits and (bias is None or gate is not None)
        given = read_slots, written, query_start_loc
        indices = (*(each.contiguous() for each in given), integers(kv_lens, "kv_lens"))
        require(fits, "pool_groups", x, tail, *filter(torch.is_tensor, (gate, bias)), indices=indices)
        x, (_, stride, _) = rows(x)
        gate, (_, gate_stride, _) = (None, (0, 0, 0)) if gate is None else rows(gate)
        bias = None if bias is None else bias.contiguous()
        y = empty((tokens, features // span), x) if out is None else out
        wrong = self._pool(
            *addresses(x, gate, bias, tail, *indices, y),
            DTYPES[x.dtype],
            bias is not None and bias.dtype is torch.float32,
            *(tokens, sequences, saves, tail.shape[0], features // span, group, span, stride, gate_stride),
        )
        _check("pool_groups", wrong, *given, tail.shape[0])
        return y

    def delta_rule_gates(
        self, a: Tensor, b: Tensor, factor: Tensor, dt_bias: Tensor, *, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.delta_rule_gates`."""
        tokens, heads = a.shape
        fits = a.shape == b.shape and a.dtype is b.dtype and factor.shape == dt_bias.shape == (heads,)
        require(fits and factor.dtype is dt_bias.dtype is torch.float32, "delta_rule_gates", a, b, factor, dt_bias)
        (a, (_, stride_a, _)), (b, (_, stride_b, _)) = rows(a), rows(b)
        factor, dt_bias = factor.contiguous(), dt_bias.contiguous()
        made = (torch.empty(a.shape, dtype=torch.float32), empty(a.shape, a)) if out is None else out
        self._gates(
            *addresses(a, b, factor, dt_bias, made[0], made[1]), DTYPES[a.dtype], tokens, heads, stride_a, stride_b
        )
        return made

    def l2_norm(self, x: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """See :func:`hal.ops.l2_norm`. It reads strided rows of x in place."""
        require(x.dim() > 0, "l2_norm", x)
        width = x.shape[-1]
        x, (heads, outer, inner) = rows(x)
        y = empty(x.shape, x) if out is None else out
        count = x.numel() // max(width, 1)
        self._l2(x.data_ptr(), y.data_ptr(), DTYPES[x.dtype], count, heads, width, outer, inner, eps)
        return y

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.gated_rms_norm`. It reads strided rows of x and of the gate in place."""
        width = x.shape[-1]
        fits = gate.shape == x.shape and gate.dtype is x.dtype
        fits = fits and weight.shape == (width,) and weight.dtype in (x.dtype, torch.float32)
        require(fits, "gated_rms_norm", x, gate, weight)
        x, (heads, *strides) = rows(x)
        gate, (_, *gate_strides) = rows(gate)
        weight = weight.contiguous()
        y = empty(x.shape, x) if out is None else out
        sizes = x.numel() // max(width, 1), heads, width, *strides, *gate_strides
        self._gated(*addresses(x, gate, weight, y), DTYPES[x.dtype], weight.dtype is torch.float32, *sizes, eps)
        return y


def _written(read_slots: Tensor, write_slots: Tensor | None) -> tuple[Tensor, int]:
    """Return the slots to write, and their number for each sequence."""
    if write_slots is None:
        return read_slots, 1
    require(write_slots.dim() == 2, "write_slots", write_slots, dtypes=(torch.int32,))
    return write_slots, write_slots.shape[1]


def _same_sequences(read_slots: Tensor, written: Tensor, saves: int, starts: Tensor) -> bool:
    """Return whether the tensors are int32, for the same sequences."""
    count = read_slots.shape[0]
    fits = read_slots.dim() == 1 and written.numel() == count * saves and starts.shape == (count + 1,)
    return fits and all(each.dtype is torch.int32 for each in (read_slots, written, starts))


def _check(name: str, wrong: int, read_slots: Tensor, written: Tensor, starts: Tensor, slots: int) -> None:
    """Raise OperationError for the sequence that the kernel refused, by its number from 1."""
    if wrong:
        row = wrong - 1
        raise OperationError(
            f"{name}: sequence {row} reads slot {int(read_slots[row])}, writes "
            f"{written.view(len(read_slots), -1)[row].tolist()}, and has the tokens "
            f"{starts[row : row + 2].tolist()}, for states of {slots} slots",
            "check the batch's slots and query_start_loc",
        )
