"""The kernels of ``numerics.invariant``: a row has the same bits in every call, whatever the other rows are.

The sums of most C++ kernels have an order that does not depend on other rows. Some kernels take another form for more
rows; here they always take one. torch's functions of elements are not among them: the last few elements of a tensor are
computed by other code than vectors of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.errors import MissingKernel
from hal.ops import operation
from hal.ops.forms import Form
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.kernels.part_of_call import row_by_row
from hal.ops.kernels.partial_kernel import FormKernels, plain
from hal.ops.projection import floating_bias

from . import low_bits
from .low_bits import by_expert
from .native.attention_kernels import UNLIMITED, AttentionKernels
from .native.expert_kernels import ExpertKernels
from .native.latent_kernels import LatentKernels
from .native.linear_kernels import Int8Kernels, LinearKernels
from .native.selection_kernels import SelectionKernels
from .native.weight_only_kernels import WeightOnlyKernels, in_groups

COPYING = ("embedding", "store_index_cache", "store_kv_cache", "store_latent_cache", "store_quantized_kv_cache")
"""Operations that copy rows, or round each element on its own."""
ALIKE = (
    "add_lora",
    *("add_rms_norm", "gated_rms_norm", "l2_norm", "layer_norm", "rms_norm"),
    *("attend_chosen", "attend_compressed", "attend_selected", "select_blocks", "select_keys"),
    *("causal_conv1d", "delta_rule_gates", "pool_groups"),
    *("collapse_streams", "expand_streams"),
    *("dynamic_quantize", "quantize", "rotary_embedding", "gelu_and_mul", "silu_and_mul"),
    *("expert_permute", "expert_unpermute"),
    *("greedy_sample", "mask_logits", "penalize", "sample"),
    "packed_attention",
    *("all_gather", "all_gather_rows", "all_reduce", "all_to_all", "reduce_scatter"),
)
"""Operations whose kernels are invariant without a change."""
BAND = 4
"""Tokens that all are multiplied with the matrices of heads in the same way."""


def invariant_kernels(library: ctypes.CDLL | None, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Return the kernels by operation: without C++ kernels, those that copy.

    Args:
        library: the C++ kernels, or None.
        kernels: all kernels of the driver.
    """
    found = {name: kernels[name] for name in (*COPYING, *(ALIKE if library else ())) if name in kernels}
    if library is None:
        return found
    attention, experts = AttentionKernels(library, few=UNLIMITED), ExpertKernels(library)
    weight_only = WeightOnlyKernels(library)
    linear = FormKernels(
        "linear",
        [
            (plain, LinearKernels(library).any_rows),
            (low_bits.exact, Int8Kernels(library, most=UNLIMITED).linear),
            (in_groups, in_pieces(weight_only.linear, weight_only.rows_alike)),
            (lambda form: True, each_row("linear", kernels["linear"])),
        ],
    )
    latent = LatentKernels(library)
    return found | {
        "channel_delta_rule": wide_states(kernels["channel_delta_rule"]),
        "gated_delta_rule": wide_states(kernels["gated_delta_rule"]),
        "grouped_linear": FormKernels(
            "grouped_linear", [(plain, experts.grouped_linear), (lambda form: True, by_expert(linear))]
        ),
        "head_linear": tokens_in_pieces(latent.head_linear),
        "latent_attention": SelectionKernels(library, few=UNLIMITED).latent_attention,
        "linear": linear,
        "paged_attention": by_query(attention.paged_attention),
        "quantized_paged_attention": by_query(attention.quantized_paged_attention),
        "topk_route": by_score(experts.topk_route),
    }


def each_row(name: str, kernel: Kernel) -> Kernel:
    """Return a kernel of a row-wise operation that calls another one for each row."""
    found = row_by_row(operation(name), kernel)
    assert found is not None
    return found


def in_pieces(linear: Kernel, most: int) -> Kernel:
    """Return a kernel of ``linear`` that calls another one for up to ``most`` rows at a time."""

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        weight_zero_point: Tensor | None,
        x_scale: Tensor | None,
        dtype: torch.dtype | None,
        form: Form,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        weights = weight, floating_bias(bias, weight_scale, form), weight_scale, weight_zero_point
        y = x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype or x.dtype) if out is None else out
        rows, results = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        scales = None if x_scale is None else x_scale.reshape(-1)
        for start in range(0, rows.shape[0], most):
            part = slice(start, start + most)
            linear(rows[part], *weights, None if scales is None else scales[part], dtype, form, out=results[part])
        return y

    return run


def tokens_in_pieces(head_linear: Kernel) -> Kernel:
    """Return a kernel of ``head_linear`` that calls another one for a few tokens at a time."""

    def run(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(*x.shape[:2], weight.shape[2]) if out is None else out
        for start in range(0, x.shape[0], BAND):
            head_linear(x[start : start + BAND], weight, out=y[start : start + BAND])
        return y

    return run


def by_query(kernel: Kernel) -> Kernel:
    """Return a kernel of attention that calls another one, for each query alone where it is composed of torch's."""
    alone = each_row(kernel.__name__, kernel)

    def run(*given: Any, out: Tensor | None = None) -> Tensor:
        composed = given[-1].chunk is not None or given[-1].alibi is not None
        attended: Tensor = (alone if composed else kernel)(*given, out=out)
        return attended

    return run


def by_score(topk_route: Kernel) -> Kernel:
    """Return a kernel of ``topk_route`` that calls another one, for each token alone if scores are torch's sigmoids."""
    alone = each_row("topk_route", topk_route)

    def run(logits: Tensor, bias: Tensor | None, top_k: int, sigmoid: bool, *rest: Any, out: Any = None) -> Any:
        return (alone if sigmoid else topk_route)(logits, bias, top_k, sigmoid, *rest, out=out)

    return run


def wide_states(kernel: Kernel) -> Kernel:
    """Return a kernel of a delta rule that refuses states which are rounded after each step."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *rest: Any, **out: Any
    ) -> Any:
        if state.dtype is not torch.float32:
            raise MissingKernel(
                f"numerics.invariant is true, but the recurrent states are kept in {state.dtype}, and a state depends "
                "on the steps after which it was rounded",
                "set numerics.invariant to false, or choose a model whose recurrent states are float32",
            )
        return kernel(query, key, value, decay, beta, state, *rest, **out)

    return run
