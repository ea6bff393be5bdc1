"""What the hardware refuses of the routing of mixtures of experts. Each case changes a call that works in one thing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import PROCESSES, thorough
from support.children import on_soc
from support.ones import bf16, f32, half, i8, i32, i64
from support.refusals import Row, check_fails, check_refused, check_works
from torch import Tensor


def gate(x: Tensor | None = None, k: int = 2, **options: Any) -> Any:
    return torch_npu.npu_moe_gating_top_k(half(4, 8) if x is None else x, k, **options)


def softmax(x: Tensor | None = None, finished: Tensor | None = None, k: int = 2) -> Any:
    return torch_npu.npu_moe_gating_top_k_softmax(half(4, 8) if x is None else x, finished, k)


def init(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "x": half(4, 16),
        "expert_idx": i32(4, 2),
        "active_num": 8,
        "expert_num": 8,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 8],
    }
    return torch_npu.npu_moe_init_routing_v2(**{**arguments, **changes})


def first(**changes: Any) -> Any:
    rows = torch.arange(8, dtype=torch.int32).view(2, 4).t().contiguous().npu()
    arguments = {"x": half(4, 16), "row_idx": rows, "expert_idx": i32(4, 2), "active_num": 4}
    return torch_npu.npu_moe_init_routing(**{**arguments, **changes})


def quant(**changes: Any) -> Any:
    arguments = {"active_num": 0, "expert_num": 8, "expert_tokens_num_mode": 1, "quant_mode": 1}
    return torch_npu.npu_moe_init_routing_quant(half(4, 16), i32(4, 2), **{**arguments, **changes})


def finalize(**changes: Any) -> Any:
    arguments = {
        "expanded_permuted_rows": half(8, 16),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": half(4, 2),
        "expanded_src_to_dst_row": torch.arange(8, dtype=torch.int32).npu(),
        "export_for_source_row": i32(4, 2),
        "drop_pad_mode": 2,
    }
    return torch_npu.npu_moe_finalize_routing(**{**arguments, **changes})


def unpermute(**changes: Any) -> Any:
    arguments = {
        "permuted_tokens": half(8, 16),
        "sorted_indices": torch.arange(8, dtype=torch.int32).npu(),
        "probs": half(4, 2),
    }
    return torch_npu.npu_moe_token_unpermute(**{**arguments, **changes})


def re_route(**changes: Any) -> Any:
    arguments = {"tokens": half(6, 16), "expert_token_num_per_rank": i32(2, 3)}
    return torch_npu.npu_moe_re_routing(**{**arguments, **changes})


PADDED = {"drop_pad_mode": 1, "expert_capacity": 2}


def cases() -> Iterator[Row]:
    yield softmax, {"x": half(1, 1100), "k": 1025}, "k must be at most 1024"
    yield gate, {"x": half(4, 2049)}, "at most 2048 experts"
    yield gate, {"k": 9}, "k must be between 1 and the number of experts in k_group groups, 8, but is 9"
    yield gate, {"k": 0}, "k must be between 1"
    yield gate, {"k": 3, "k_group": 1, "group_count": 4}, "in k_group groups, 2, but is 3"
    yield gate, {"group_count": 3}, "must be a multiple of group_count, 3"
    yield gate, {"k_group": 5, "group_count": 4}, "k_group must be between 1 and group_count, 4, but is 5"
    yield gate, {"group_select_mode": 2}, "group_select_mode must be 0 or 1"
    yield gate, {"k_group": 4, "group_count": 8, "group_select_mode": 1}, "must have at least 2 experts, but has 1"
    yield gate, {"x": half(4, 210), "k_group": 4, "group_count": 70}, "may be at most 2048, but are 2240"
    yield gate, {"norm_type": 2}, "on Ascend 950 also 2, but is 2"
    yield gate, {"renorm": 2}, "renorm must be 0 or 1"
    yield init, {"x": i32(4, 16)}, "x must be float16, bfloat16, float32 or int8, not Int"
    yield init, {"x": half(5, 16)}, r"x must be .tokens, H. and expert_idx .tokens, K."
    yield init, {"expert_idx": i64(4, 2)}, "expert_idx must be int32, not Long"
    yield init, {"active_num": -2}, "active_num must be at least -1"
    yield init, {"expert_num": 0, "active_expert_range": [0, 1]}, "expert_num must be between 1 and 10240"
    yield init, {"expert_num": 10241}, "expert_num must be between 1 and 10240"
    yield init, {"expert_num": 5121, "expert_tokens_num_type": 2}, "expert_num must be between 1 and 5120"
    yield init, {"active_expert_range": [0, 9]}, r"within .0, expert_num., .0, 8., .* but is .0, 9."
    yield init, {"active_expert_range": [4, 4]}, "and not empty"
    yield init, {"drop_pad_mode": 2}, "drop_pad_mode must be 0 or 1"
    yield init, {"expert_tokens_num_type": -1}, "expert_tokens_num_type must be 0"
    yield init, {"row_idx_type": 2}, "row_idx_type must be 0"
    yield init, {"quant_mode": 2}, "quant_mode must be -1, 0 or 1, on Ascend 950 also"
    yield init, {**PADDED, "expert_capacity": 5}, "expert_capacity must be between 1 and 4, but is 5"
    yield init, {**PADDED, "row_idx_type": 1}, "with drop_pad_mode 1 row_idx_type must be 0"
    yield init, {**PADDED, "expert_tokens_num_type": 0}, "with drop_pad_mode 1 expert_tokens_num_type must be 1"
    yield init, {**PADDED, "active_expert_range": [0, 7]}, r"active_expert_range must be .0, expert_num."
    yield init, {"x": i8(4, 16), "quant_mode": 1}, "int8 x cannot be quantized"
    yield init, {"scale": half(4)}, "scale must be float32, not Half"
    yield init, {"scale": f32(5)}, "an element for each of the 4 rows"
    yield init, {"quant_mode": 0}, "with quant_mode 0 scale must be given"
    yield init, {"quant_mode": 0, "scale": f32(1)}, "with quant_mode 0 offset must be given"
    yield init, {"quant_mode": 1, "scale": f32(2, 16)}, r".8, 16., on Atlas A2 and A3 also .1, H."
    yield quant, {"active_num": -1}, "active_num must be at least 0"
    yield quant, {"expert_num": 0}, "expert_num must be greater than 0 to pad or to count"
    yield quant, {"expert_capacity": 9, "drop_pad_mode": 1}, "expert_capacity must be between 1 and 4, but is 9"
    yield quant, {"quant_mode": 0}, "with quant_mode 0 scale must be given"
    yield quant, {"scale": f32(3, 16)}, r"scale must be .1, H. or .expert_num, H."
    yield finalize, {"drop_pad_mode": 4}, "drop_pad_mode must be between 0 and 3"
    yield finalize, {"drop_pad_mode": 3}, r"with drop_pad_mode 1 and 3, but has shape .8, 16."
    yield finalize, {"scales": f32(4, 2)}, "or float32 where that is bfloat16, not Float"
    yield finalize, {"k": 3}, "k must be that of scales, 2, or 1, but is 3"
    yield finalize, {"scales": half(3, 2)}, "expanded_row_idx must have 3 . 2 elements, but has 8"
    yield finalize, {"expanded_permuted_rows": half(7, 16)}, "as many rows as expanded_row_idx has elements, 8"
    yield finalize, {"skip2": half(4, 16)}, "x2 needs x1"
    yield finalize, {"skip1": half(4, 15)}, "x1 must have the output's shape"
    yield finalize, {"skip1": bf16(4, 16)}, "x1 must be of expanded_x's dtype"
    yield finalize, {"bias": half(8, 16), "export_for_source_row": None}, "bias needs expert_idx"
    yield finalize, {"bias": half(1, 16)}, "at least K = 2 experts, but bias has 1"
    yield finalize, {"export_for_source_row": i64(4, 2)}, "expert_idx must be int32 .tokens, K., not Long"
    yield finalize, {"expanded_src_to_dst_row": i64(8)}, "expanded_row_idx must be int32"
    yield unpermute, {"permuted_tokens": i8(8, 16)}, "permuted_tokens must be float16"
    yield unpermute, {"sorted_indices": i64(8)}, "sorted_indices must be int32"
    yield unpermute, {"sorted_indices": i32(6)}, "as many elements as probs, 8, but has 6"
    yield unpermute, {"padded_mode": True}, "padded_mode must be False"
    yield unpermute, {"probs": half(1, 513), "sorted_indices": i32(513)}, "K must be at most 512"
    yield re_route, {"tokens": half(6, 16384)}, "with H below 16384"
    yield re_route, {"tokens": f32(6, 16)}, "tokens must be float16, bfloat16 or int8"
    yield re_route, {"expert_token_num_type": 0}, "expert_token_num_type must be 1"
    yield re_route, {"idx_type": 1}, "idx_type must be 0, on Ascend 950 0 or 1"
    yield re_route, {"per_token_scales": f32(5)}, "per_token_scales must be float32 .A."
    permute, counted = torch_npu.npu_moe_token_permute, torch_npu.npu_moe_compute_expert_tokens
    yield lambda: permute(i8(4, 16), i32(4, 2)), {}, "on Ascend 950 also int8, not Char"
    yield lambda: permute(half(4, 16), i32(4, 2), None, True), {}, "padded_mode must be False"
    yield lambda: counted(i32(4), 2049), {}, "num_experts must be between 1 and 2048, but is 2049"


def test_refusals() -> None:
    check_works((gate, softmax, init, first, quant, finalize, unpermute, re_route))
    check_refused(cases())


def at_run_time() -> Iterator[Row]:
    yield init, {"expert_idx": i32(4, 2) * 9}, "expert_idx has 9, but there are 8 experts"
    yield quant, {"expert_num": 1}, "expert_idx has 1 to 1, but there are 1 experts"
    yield first, {"row_idx": i32(4, 2) * 8}, "row_idx must be between 0 and 7"
    yield finalize, {"expanded_src_to_dst_row": i32(8) * -1}, "expanded_row_idx has -1 to -1, but"
    yield finalize, {"expanded_src_to_dst_row": i32(8) * 8}, "but expanded_x has 8 rows"
    yield unpermute, {"sorted_indices": i32(8) * -1}, "sorted_indices has -1 to -1"
    yield re_route, {"expert_token_num_per_rank": i32(3, 3)}, "must add up to the 6 tokens"
    yield lambda: torch_npu.npu_moe_token_permute(half(4, 16), i32(4, 2) * -1), {}, "indices must be between 0 and"
    falling = torch.tensor([1, 0], dtype=torch.int32).npu()
    ascend = "sorted_experts must ascend and be between 0 and 2"
    yield lambda: torch_npu.npu_moe_compute_expert_tokens(falling, 2), {}, ascend


def test_contents(capfd: pytest.CaptureFixture[str]) -> None:
    check_fails(at_run_time(), capfd)


SCRIPT = """
import torch, torch_npu

def t(*shape, dtype=torch.float16):
    return torch.ones(shape, dtype=dtype, device="npu")

I32, I8, F32, BF16 = torch.int32, torch.int8, torch.float32, torch.bfloat16
idx, order = t(4, 2, dtype=I32), torch.arange(8, dtype=I32).npu()
routing = {"expert_num": 8, "active_expert_range": [0, 8], "expert_tokens_num_type": 1}
full = {"active_num": 8, "expert_tokens_num_flag": True, **routing}
npu = torch_npu
CALLS = {
    "gate": lambda: npu.npu_moe_gating_top_k(t(4, 16), 2),
    "gate softplus": lambda: npu.npu_moe_gating_top_k(t(4, 16), 2, norm_type=2),
    "softmax": lambda: npu.npu_moe_gating_top_k_softmax(t(4, 16), None, 2),
    "softmax bf16": lambda: npu.npu_moe_gating_top_k_softmax(t(4, 16, dtype=BF16), None, 2),
    "softmax 8 experts": lambda: npu.npu_moe_gating_top_k_softmax(t(4, 8), None, 2),
    "softmax 2064 experts": lambda: npu.npu_moe_gating_top_k_softmax(t(4, 2064), None, 2),
    "softmax v2": lambda: npu.npu_moe_gating_top_k_softmax_v2(t(4, 16), k=2),
    "init": lambda: npu.npu_moe_init_routing_v2(t(4, 32), idx, **full),
    "init bf16": lambda: npu.npu_moe_init_routing_v2(t(4, 32, dtype=BF16), idx, **full),
    "init H 16": lambda: npu.npu_moe_init_routing_v2(t(4, 16), idx, **full),
    "init active -1": lambda: npu.npu_moe_init_routing_v2(t(4, 32), idx, **{**full, "active_num": -1}),
    "init active 0": lambda: npu.npu_moe_init_routing_v2(t(4, 32), idx, **{**full, "active_num": 0}),
    "init uncounted": lambda: npu.npu_moe_init_routing_v2(t(4, 32), idx, active_num=8, **routing),
    "init smooth": lambda: npu.npu_moe_init_routing_v2(t(4, 32), idx, scale=t(1, 32, dtype=F32), quant_mode=1, **full),
    "first": lambda: npu.npu_moe_init_routing(t(4, 32), idx * 0 + order.view(4, 2), idx, 4),
    "quant": lambda: npu.npu_moe_init_routing_quant(t(4, 32), idx, active_num=0, expert_num=8),
    "permute": lambda: npu.npu_moe_token_permute(t(4, 32), idx),
    "permute int8": lambda: npu.npu_moe_token_permute(t(4, 32, dtype=I8), idx),
    "unpermute": lambda: npu.npu_moe_token_unpermute(t(8, 128), order, t(4, 2)),
    "unpermute H 32": lambda: npu.npu_moe_token_unpermute(t(8, 32), order, t(4, 2)),
    "finalize": lambda: npu.npu_moe_finalize_routing(t(8, 32), None, None, None, t(4, 2), order, None, 2),
    "finalize 0": lambda: npu.npu_moe_finalize_routing(t(8, 32), None, None, None, t(4, 2), order, None, 0),
    "finalize experts": lambda: npu.npu_moe_finalize_routing(t(8, 32), None, None, None, t(4, 2), order, idx, 2),
    "finalize mixed": lambda: npu.npu_moe_finalize_routing(
        t(8, 32), None, None, None, t(4, 2, dtype=F32), order, None, 2),
    "re-route": lambda: npu.npu_moe_re_routing(t(6, 16), t(2, 3, dtype=I32)),
    "re-route scatter": lambda: npu.npu_moe_re_routing(t(6, 16), t(2, 3, dtype=I32), idx_type=1),
}
for name, call in CALLS.items():
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError:
        print(name)
"""

ONLY_950 = {"gate softplus", "permute int8", "finalize mixed", "re-route scatter"}
TAKEN_310P = {"softmax", "init", "init active 0", "init uncounted", "unpermute", "finalize"}


@thorough(PROCESSES)
@pytest.mark.parametrize("soc", ["Ascend910_9391", "Ascend310P3", "Ascend950PR_9599"])
def test_what_a_generation_takes(clean: dict[str, str], soc: str) -> None:
    refused = set(on_soc(soc, SCRIPT, clean).splitlines())
    asked = {line.split('"')[1] for line in SCRIPT.splitlines() if '": lambda' in line}
    if soc.startswith("Ascend910"):
        assert refused == ONLY_950
    elif soc.startswith("Ascend310P"):
        assert refused == asked - TAKEN_310P
    else:
        assert refused == {"softmax 2064 experts", "init active 0", "init uncounted", "init smooth"}
