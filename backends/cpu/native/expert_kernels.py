"""Python bindings of the C++ kernels of mixtures of experts."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops import GatedActivation

from ..low_bits import wrong_counts
from .arguments import DTYPES, Bindings, addresses, empty, integers, require

ACTIVATIONS = (None, "none", "tanh")
"""Values of ``approximate`` in the order of Gating in experts.cpp. The clipped activation follows."""
EXPERT_KERNELS = ("expert_mlp", "expert_permute", "expert_unpermute", "topk_route")


class ExpertKernels(Bindings):
    """The bindings, as :mod:`.kernels` describes them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        function = self.function
        pointers = [c_void_p] * 6
        self._route = function("topk_route", None, *pointers[:4], c_int, *[c_int64] * 3, c_int, c_float, *[c_int64] * 3)
        self._permute = function("expert_permute", c_int64, *pointers[:5], *[c_int64] * 4)
        self._unpermute = function("expert_unpermute", c_int64, *pointers[:4], c_int, c_int, *[c_int64] * 3)
        self._grouped = function("grouped_linear", c_int64, *pointers[:5], c_int, c_int, *[c_int64] * 4)
        gating = c_int, c_float, c_float, c_int
        self._mlp = function("expert_mlp", c_int64, *[c_void_p] * 8, *[c_int] * 3, *gating, *[c_int64] * 5)

    def topk_route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        sigmoid: bool,
        renormalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
        group_best: int,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`hal.ops.topk_route`. torch computes the scores, so that their ties are the reference's."""
        tokens, num_experts = logits.shape
        fits = num_groups >= 1 and num_experts % num_groups == 0 and 1 <= top_groups <= num_groups
        fits = fits and 1 <= group_best <= num_experts // num_groups
        require(fits and 1 <= top_k <= num_experts // num_groups * top_groups, "topk_route", logits)
        if bias is not None:
            require(bias.shape == (num_experts,) and bias.dtype is torch.float32, "topk_route", logits, bias)
            bias = bias.contiguous()
        wide = logits.float()
        scores = (wide.sigmoid() if sigmoid else wide.softmax(-1)).contiguous()
        new = torch.empty(tokens, top_k, dtype=logits.dtype), torch.empty(tokens, top_k, dtype=torch.int32)
        weights, experts = new if out is None else out
        self._route(
            *addresses(scores, bias, weights, experts),
            DTYPES[logits.dtype],
            tokens,
            num_experts,
            top_k,
            renormalize,
            scale,
            num_groups,
            top_groups,
            group_best,
        )
        return weights, experts

    def expert_permute(
        self, x: Tensor, experts: Tensor, num_experts: int, *, out: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`hal.ops.expert_permute`. It sorts by counting.

        Raises:
            OperationError: an expert does not exist, or shapes or dtypes differ.
        """
        (tokens, width), experts = x.shape, integers(experts, "experts")
        require(experts.dim() == 2 and experts.shape[0] == tokens, "expert_permute", x, indices=(experts,))
        x, rows = x.contiguous(), experts.numel()
        new = (
            empty((rows, width), x),
            torch.empty(num_experts, dtype=torch.int64),
            torch.empty(rows, dtype=torch.int32),
        )
        y, counts, positions = new if out is None else out
        sizes = tokens, experts.shape[1], num_experts, width * x.element_size()
        wrong = self._permute(*addresses(x, experts, y, counts, positions), *sizes)
        _refuse(wrong, "expert_permute", experts, num_experts)
        return y, counts, positions

    def expert_unpermute(
        self, rows: Tensor, positions: Tensor, weights: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """See :func:`hal.ops.expert_unpermute`. It widens no copy of the rows.

        Raises:
            OperationError: a position is outside the rows, or shapes or dtypes differ.
        """
        (tokens, top_k), width, positions = weights.shape, rows.shape[1], integers(positions, "positions")
        fits = rows.shape[0] == tokens * top_k == positions.numel() and weights.dtype in (rows.dtype, torch.float32)
        require(fits, "expert_unpermute", rows, weights, indices=(positions,))
        rows, weights = rows.contiguous(), weights.contiguous()
        y = empty((tokens, width), rows) if out is None else out
        wrong = self._unpermute(
            *addresses(rows, positions, weights, y),
            DTYPES[rows.dtype],
            weights.dtype is torch.float32,
            tokens,
            top_k,
            width,
        )
        if wrong:
            raise OperationError(
                f"expert_unpermute: position {int(positions[wrong - 1])} is outside {rows.shape[0]} rows",
                "give the positions that expert_permute returned",
            )
        return y

    def grouped_linear(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None,
        *_: Any,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.grouped_linear`, of floating-point weights. It reads only those of experts with rows.

        Raises:
            OperationError: the counts exceed the rows, or shapes or dtypes differ.
        """
        num_experts, out_features, width = weight.shape
        fits = x.shape[1:] == (width,) and weight.dtype is x.dtype
        fits = fits and counts.shape == (num_experts,) and counts.dtype is torch.int64
        fits = fits and _fits(bias, x, (num_experts, out_features))
        require(fits, "grouped_linear", x, weight, indices=(counts,))
        x, weight, counts = x.contiguous(), weight.contiguous(), counts.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = empty((x.shape[0], out_features), x) if out is None else out
        sizes = x.shape[0], num_experts, out_features, width
        wrong = self._grouped(
            *addresses(x, weight, counts, bias, y),
            DTYPES[x.dtype],
            bias is not None and bias.dtype is torch.float32,
            *sizes,
        )
        if wrong:
            raise wrong_counts(counts, x.shape[0])
        return y

    def expert_mlp(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        experts: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: GatedActivation,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.expert_mlp`. It reads only the chosen experts' weights, each once.

        Raises:
            OperationError: an expert does not exist, or shapes or dtypes differ.
        """
        (tokens, hidden), (num_experts, _, width), experts = x.shape, down.shape, integers(experts, "experts")
        fits = gate_up.shape == (num_experts, 2 * width, hidden) and down.shape == (num_experts, hidden, width)
        fits = fits and weights.shape == experts.shape and experts.dim() == 2 and experts.shape[0] == tokens
        fits = fits and x.dtype is gate_up.dtype is down.dtype and weights.dtype in (x.dtype, torch.float32)
        fits = fits and _fits(gate_up_bias, x, (num_experts, 2 * width)) and _fits(down_bias, x, (num_experts, hidden))
        require(
            fits and activation.approximate in ACTIVATIONS, "expert_mlp", x, gate_up, down, weights, indices=(experts,)
        )
        x, weights = x.contiguous(), weights.contiguous()
        gate_up, down = gate_up.contiguous(), down.contiguous()
        biases = [None if bias is None else bias.contiguous() for bias in (gate_up_bias, down_bias)]
        wide = any(bias is not None and bias.dtype is torch.float32 for bias in biases)
        if wide:  # Both have one dtype in C++.
            biases = [None if bias is None else bias.float() for bias in biases]
        y = empty(x.shape, x) if out is None else out
        sizes = tokens, hidden, width, num_experts, experts.shape[1]
        wrong = self._mlp(
            *addresses(x, gate_up, down, weights, experts, *biases, y),
            DTYPES[x.dtype],
            weights.dtype is torch.float32,
            wide,
            ACTIVATIONS.index(activation.approximate) if activation.alpha is None else len(ACTIVATIONS),
            activation.alpha or 0.0,
            activation.limit or 0.0,
            activation.interleaved,
            *sizes,
        )
        _refuse(wrong, "expert_mlp", experts, num_experts)
        return y


def _fits(bias: Tensor | None, x: Tensor, shape: tuple[int, ...]) -> bool:
    return bias is None or (bias.shape == shape and bias.dtype in (x.dtype, torch.float32) and bias.is_cpu)


def _refuse(wrong: int, operation: str, experts: Tensor, num_experts: int) -> None:
    """Raise OperationError if ``wrong`` is not 0, but 1 + the index of an assignment."""
    if wrong:
        raise OperationError(
            f"{operation}: token {(wrong - 1) // experts.shape[1]} has expert {int(experts.flatten()[wrong - 1])}, but "
            f"there are {num_experts} experts",
            "give experts as topk_route returns them",
        )
