"""Kernels for mixtures of experts, on the generations A2, A3 and 950.

Sources: the documentation of torch_npu (npu_moe_* and npu_grouped_matmul*), and of CANN's ops-transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from torch import Tensor

from hal.ops.declaration.operation import operation
from hal.ops.experts.grouped import row_experts
from hal.ops.kernels.kernel_table import Kernel

from .kernels import in_fractal_nz

if TYPE_CHECKING:
    from hal.nn import WeightUse

MAX_EXPERTS = 2048
"""The most experts that npu_moe_gating_top_k supports."""
COUNTS = 1
"""``expert_tokens_num_type`` and ``group_list_type``: the number of rows of each expert."""
ALL = -1
"""``active_num``: all rows."""
PLAIN, STATIC, DYNAMIC = -1, 0, 1
"""``quant_mode`` of npu_moe_init_routing_v2."""
BY_TOKEN = 2
"""``drop_pad_mode`` of npu_moe_finalize_routing: no dropped rows, and positions by token."""


def kernels() -> dict[str, Kernel]:
    """Return the kernels of routing, by operation."""
    return {
        "expert_permute": expert_permute,
        "expert_unpermute": expert_unpermute,
        "topk_route": topk_route,
    }


def topk_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
    group_best: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`hal.ops.topk_route`.

    One launch without a bias; with one, logits are computed in float32, the bias's dtype. npu_moe_gating_top_k divides
    sigmoid scores always, so unnormalized weights are gathered from its third result. The reference runs for more
    experts than it supports.
    """
    if logits.shape[1] > MAX_EXPERTS:
        return operation("topk_route").reference(  # type: ignore[no-any-return]
            logits, bias, top_k, sigmoid, renormalize, scale, num_groups, top_groups, group_best
        )
    if not logits.shape[0]:
        return logits.new_empty(0, top_k), logits.new_empty(0, top_k, dtype=torch.int32)
    given = logits if bias is None else logits.float()
    weights, experts, scores = torch_npu.npu_moe_gating_top_k(
        given,
        top_k,
        bias=bias,
        k_group=top_groups,
        group_count=num_groups,
        group_select_mode=group_best - 1,
        renorm=int(renormalize and not sigmoid),
        norm_type=int(sigmoid),
        out_flag=sigmoid and not renormalize,
        routed_scaling_factor=scale,
    )
    if sigmoid and not renormalize:
        weights = scores.gather(-1, experts.long()) * scale
    return weights.to(logits.dtype), experts


def permuted(x: Tensor, experts: Tensor, num_experts: int, quant_mode: int = PLAIN) -> tuple[Tensor, ...]:
    """Return the rows sorted by expert, their counts and positions, and, quantized dynamically, their scales.

    The range of experts is given although it holds all: without it, torch_npu 2.13 keeps the number of experts of the
    first call.
    """
    rows, positions, counts, scale = torch_npu.npu_moe_init_routing_v2(
        x,
        experts,
        active_num=ALL,
        expert_num=num_experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        quant_mode=quant_mode,
        active_expert_range=[0, num_experts],
        row_idx_type=0,
    )
    return rows, counts, positions, scale


def expert_permute(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`hal.ops.expert_permute`."""
    if not x.shape[0]:
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
        return x.new_empty(0, x.shape[1]), counts, experts.new_empty(0)
    rows, counts, positions, _ = permuted(x, experts, num_experts)
    return rows, counts, positions


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
    """See :func:`hal.ops.grouped_linear`, of floating-point weights."""
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[1])
    return grouped_matmul(x, weight, counts, bias=None if bias is None else [prepared_bias(bias, x.dtype)])


def add_bias(values: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Return rows plus the biases of their experts, for products that take none."""
    owners = row_experts(values, counts).squeeze(-1).clamp(max=bias.shape[0] - 1)
    return values + bias.index_select(0, owners)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, **options: Any) -> Tensor:
    """Call npu_grouped_matmul for weights ``[num_experts, out_features, in_features]``."""
    (output,) = torch_npu.npu_grouped_matmul(
        [x.contiguous()],
        [weight.transpose(1, 2)],
        group_list=counts,
        split_item=3,
        group_type=0,
        group_list_type=COUNTS,
        **options,
    )
    return output  # type: ignore[no-any-return]


def expert_unpermute(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """See :func:`hal.ops.expert_unpermute`. npu_moe_finalize_routing takes float32 weights with bfloat16 rows only."""
    if not weights.shape[0]:
        return rows.new_empty(0, rows.shape[1])
    if rows.dtype is torch.float16:
        weights = weights.to(rows.dtype)
    return torch_npu.npu_moe_finalize_routing(  # type: ignore[no-any-return]
        rows, None, None, None, weights, positions, None, drop_pad_mode=BY_TOKEN
    )


def prepared(weights: Mapping[str, Tensor], use: WeightUse, *, nz: bool) -> Mapping[str, Tensor]:
    """Return the tensors of floating-point experts in the format and the dtypes of :func:`grouped_linear`.

    npu_grouped_matmul supports FRACTAL_NZ for two or more experts.
    """
    found = dict(weights)
    if nz and "weight" in weights and weights["weight"].shape[0] > 1:
        found["weight"] = in_fractal_nz(weights["weight"])
    if "bias" in weights:
        found["bias"] = prepared_bias(weights["bias"], use.dtype)
    return found


def prepared_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias in the dtype that npu_grouped_matmul and npu_weight_quant_batchmatmul take with x of ``dtype``."""
    return bias.to(torch.float32 if dtype is torch.bfloat16 else dtype)
