"""A stand-in for vllm_ascend.vllm_ascend_C, vllm-ascend's own operators, which CANN's compiler compiles for hardware.

It has those that dense and sparse models call, in operators of torch_npu. Another is no attribute of
``torch.ops._C_ascend``, so that a call names it.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

LIBRARY = torch.library.Library("_C_ascend", "FRAGMENT")


def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of the sum, its reciprocal root mean square, and the sum."""
    normed, scale, total = torch_npu.npu_add_rms_norm(x1, x2, gamma, epsilon)
    return normed if beta is None else normed + beta, scale, total


def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's weights and experts ``[tokens, k]``, and all scores; ``renorm`` is of softmax's weights."""
    weights, experts, scores = torch_npu.npu_moe_gating_top_k(
        x,
        k=k,
        bias=bias_opt,
        k_group=k_group,
        group_count=group_count,
        group_select_mode=group_select_mode,
        norm_type=norm_type,
        out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor,
        eps=eps,
    )
    if renorm and norm_type == 0:
        weights = weights / weights.sum(-1, keepdim=True) * routed_scaling_factor
    return weights, experts, scores


# vllm-ascend registers fakes of these two, which only adapters call.
LIBRARY.define("bgmv_expand(Tensor x, Tensor weight, Tensor indices, Tensor y, int offset, int size) -> Tensor")
LIBRARY.define("sgmv_expand(Tensor x, Tensor w, Tensor indices, Tensor lens, Tensor y, int offset, int size) -> Tensor")
for function in (npu_add_rms_norm_bias, moe_gating_top_k):
    LIBRARY.define(function.__name__ + torch.library.infer_schema(function, mutates_args=()))
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")
