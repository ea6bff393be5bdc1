"""What the hardware refuses of the routing of mixtures of experts. Each case changes a call that works in one thing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import PROCESSES, thorough
from torch import Tensor

HALF, BF16, FLOAT, INT8, INT32, INT64 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.int32,
    torch.int64,
)


def t(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def gate(x: Tensor | None = None, k: int = 2, **options: Any) -> Any:
    return torch_npu.npu_moe_gating_top_k(t(4, 8) if x is None else x, k, **options)


def softmax(x: Tensor | None = None, finished: Tensor | None = None, k: int = 2) -> Any:
    return torch_npu.npu_moe_gating_top_k_softmax(t(4, 8) if x is None else x, finished, k)


def init(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "x": t(4, 16),
        "expert_idx": t(4, 2, dtype=INT32),
        "active_num": 8,
        "expert_num": 8,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 8],
    }
    return torch_npu.npu_moe_init_routing_v2(**{**arguments, **changes})


def first(**changes: Any) -> Any:
    rows = torch.arange(8, dtype=INT32).view(2, 4).t().contiguous().npu()
    arguments = {"x": t(4, 16), "row_idx": rows, "expert_idx": t(4, 2, dtype=INT32), "active_num": 4}
    return torch_npu.npu_moe_init_routing(**{**arguments, **changes})


def quant(**changes: Any) -> Any:
    arguments = {"active_num": 0, "expert_num": 8, "expert_tokens_num_mode": 1, "quant_mode": 1}
    return torch_npu.npu_moe_init_routing_quant(t(4, 16), t(4, 2, dtype=INT32), **{**arguments, **changes})


def finalize(**changes: Any) -> Any:
    arguments = {
        "expanded_permuted_rows": t(8, 16),
        "skip1": None,
        "skip2": None,
        "bias": None,
        "scales": t(4, 2),
        "expanded_src_to_dst_row": torch.arange(8, dtype=INT32).npu(),
        "export_for_source_row": t(4, 2, dtype=INT32),
        "drop_pad_mode": 2,
    }
    return torch_npu.npu_moe_finalize_routing(**{**arguments, **changes})


def unpermute(**changes: Any) -> Any:
    arguments = {"permuted_tokens": t(8, 16), "sorted_indices": torch.arange(8, dtype=INT32).npu(), "probs": t(4, 2)}
    return torch_npu.npu_moe_token_unpermute(**{**arguments, **changes})


def re_route(**changes: Any) -> Any:
    arguments = {"tokens": t(6, 16), "expert_token_num_per_rank": t(2, 3, dtype=INT32)}
    return torch_npu.npu_moe_re_routing(**{**arguments, **changes})


PADDED = {"drop_pad_mode": 1, "expert_capacity": 2}
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("softmax", {"x": ("ones", 1, 1100), "k": 1025}, "k must be at most 1024"),
    ("gate", {"x": ("ones", 4, 2049)}, "at most 2048 experts"),
    ("gate", {"k": 9}, "k must be between 1 and the number of experts in k_group groups, 8, but is 9"),
    ("gate", {"k": 0}, "k must be between 1"),
    ("gate", {"k": 3, "k_group": 1, "group_count": 4}, "in k_group groups, 2, but is 3"),
    ("gate", {"group_count": 3}, "must be a multiple of group_count, 3"),
    ("gate", {"k_group": 5, "group_count": 4}, "k_group must be between 1 and group_count, 4, but is 5"),
    ("gate", {"group_select_mode": 2}, "group_select_mode must be 0 or 1"),
    ("gate", {"k_group": 4, "group_count": 8, "group_select_mode": 1}, "must have at least 2 experts, but has 1"),
    ("gate", {"x": ("ones", 4, 210), "k_group": 4, "group_count": 70}, "may be at most 2048, but are 2240"),
    ("gate", {"norm_type": 2}, "on Ascend 950 also 2, but is 2"),
    ("gate", {"renorm": 2}, "renorm must be 0 or 1"),
    ("init", {"x": ("ones", 4, 16, INT32)}, "x must be float16, bfloat16, float32 or int8, not Int"),
    ("init", {"x": ("ones", 5, 16)}, r"x must be .tokens, H. and expert_idx .tokens, K."),
    ("init", {"expert_idx": ("ones", 4, 2, INT64)}, "expert_idx must be int32, not Long"),
    ("init", {"active_num": -2}, "active_num must be at least -1"),
    ("init", {"expert_num": 0, "active_expert_range": [0, 1]}, "expert_num must be between 1 and 10240"),
    ("init", {"expert_num": 10241}, "expert_num must be between 1 and 10240"),
    ("init", {"expert_num": 5121, "expert_tokens_num_type": 2}, "expert_num must be between 1 and 5120"),
    ("init", {"active_expert_range": [0, 9]}, r"within .0, expert_num., .0, 8., .* but is .0, 9."),
    ("init", {"active_expert_range": [4, 4]}, "and not empty"),
    ("init", {"drop_pad_mode": 2}, "drop_pad_mode must be 0 or 1"),
    ("init", {"expert_tokens_num_type": -1}, "expert_tokens_num_type must be 0"),
    ("init", {"row_idx_type": 2}, "row_idx_type must be 0"),
    ("init", {"quant_mode": 2}, "quant_mode must be -1, 0 or 1, on Ascend 950 also"),
    ("init", {**PADDED, "expert_capacity": 5}, "expert_capacity must be between 1 and 4, but is 5"),
    ("init", {**PADDED, "row_idx_type": 1}, "with drop_pad_mode 1 row_idx_type must be 0"),
    ("init", {**PADDED, "expert_tokens_num_type": 0}, "with drop_pad_mode 1 expert_tokens_num_type must be 1"),
    ("init", {**PADDED, "active_expert_range": [0, 7]}, r"active_expert_range must be .0, expert_num."),
    ("init", {"x": ("ones", 4, 16, INT8), "quant_mode": 1}, "int8 x cannot be quantized"),
    ("init", {"scale": ("ones", 4, HALF)}, "scale must be float32, not Half"),
    ("init", {"scale": ("ones", 5, FLOAT)}, "an element for each of the 4 rows"),
    ("init", {"quant_mode": 0}, "with quant_mode 0 scale must be given"),
    ("init", {"quant_mode": 0, "scale": ("ones", 1, FLOAT)}, "with quant_mode 0 offset must be given"),
    ("init", {"quant_mode": 1, "scale": ("ones", 2, 16, FLOAT)}, r".8, 16., on Atlas A2 and A3 also .1, H."),
    ("quant", {"active_num": -1}, "active_num must be at least 0"),
    ("quant", {"expert_num": 0}, "expert_num must be greater than 0 to pad or to count"),
    ("quant", {"expert_capacity": 9, "drop_pad_mode": 1}, "expert_capacity must be between 1 and 4, but is 9"),
    ("quant", {"quant_mode": 0}, "with quant_mode 0 scale must be given"),
    ("quant", {"scale": ("ones", 3, 16, FLOAT)}, r"scale must be .1, H. or .expert_num, H."),
    ("finalize", {"drop_pad_mode": 4}, "drop_pad_mode must be between 0 and 3"),
    ("finalize", {"drop_pad_mode": 3}, r"with drop_pad_mode 1 and 3, but has shape .8, 16."),
    ("finalize", {"scales": ("ones", 4, 2, FLOAT)}, "or float32 where that is bfloat16, not Float"),
    ("finalize", {"k": 3}, "k must be that of scales, 2, or 1, but is 3"),
    ("finalize", {"scales": ("ones", 3, 2)}, "expanded_row_idx must have 3 . 2 elements, but has 8"),
    ("finalize", {"expanded_permuted_rows": ("ones", 7, 16)}, "as many rows as expanded_row_idx has elements, 8"),
    ("finalize", {"skip2": ("ones", 4, 16)}, "x2 needs x1"),
    ("finalize", {"skip1": ("ones", 4, 15)}, "x1 must have the output's shape"),
    ("finalize", {"skip1": ("ones", 4, 16, BF16)}, "x1 must be of expanded_x's dtype"),
    ("finalize", {"bias": ("ones", 8, 16), "export_for_source_row": None}, "bias needs expert_idx"),
    ("finalize", {"bias": ("ones", 1, 16)}, "at least K = 2 experts, but bias has 1"),
    ("finalize", {"export_for_source_row": ("ones", 4, 2, INT64)}, "expert_idx must be int32 .tokens, K., not Long"),
    ("finalize", {"expanded_src_to_dst_row": ("ones", 8, INT64)}, "expanded_row_idx must be int32"),
    ("unpermute", {"permuted_tokens": ("ones", 8, 16, INT8)}, "permuted_tokens must be float16"),
    ("unpermute", {"sorted_indices": ("ones", 8, INT64)}, "sorted_indices must be int32"),
    ("unpermute", {"sorted_indices": ("ones", 6, INT32)}, "as many elements as probs, 8, but has 6"),
    ("unpermute", {"padded_mode": True}, "padded_mode must be False"),
    ("unpermute", {"probs": ("ones", 1, 513), "sorted_indices": ("ones", 513, INT32)}, "K must be at most 512"),
    ("re_route", {"tokens": ("ones", 6, 16384)}, "with H below 16384"),
    ("re_route", {"tokens": ("ones", 6, 16, FLOAT)}, "tokens must be float16, bfloat16 or int8"),
    ("re_route", {"expert_token_num_type": 0}, "expert_token_num_type must be 1"),
    ("re_route", {"idx_type": 1}, "idx_type must be 0, on Ascend 950 0 or 1"),
    ("re_route", {"per_token_scales": ("ones", 5, FLOAT)}, "per_token_scales must be float32 .A."),
]


def made(value: Any) -> Any:
    """A tensor of ones from ("ones", sizes.., dtype)."""
    if not isinstance(value, tuple):
        return value
    dtype = value[-1] if isinstance(value[-1], torch.dtype) else HALF
    return t(*(size for size in value[1:] if isinstance(size, int)), dtype=dtype)


def call(name: str, changes: dict[str, Any]) -> Any:
    return globals()[name](**{key: made(value) for key, value in changes.items()})


@pytest.mark.parametrize("name", ["gate", "softmax", "init", "first", "quant", "finalize", "unpermute", "re_route"])
def test_the_calls_that_are_changed_work(name: str) -> None:
    results = call(name, {})
    torch.npu.synchronize()
    assert (results if isinstance(results, Tensor) else results[0]).shape[-1] in (2, 16)


@pytest.mark.parametrize(("name", "changes", "reason"), CALLS, ids=range(len(CALLS)))
def test_a_changed_call_is_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        call(name, changes)
    torch.npu.synchronize()


def test_what_permutation_refuses() -> None:
    with pytest.raises(RuntimeError, match="on Ascend 950 also int8, not Char"):
        torch_npu.npu_moe_token_permute(t(4, 16, dtype=INT8), t(4, 2, dtype=INT32))
    with pytest.raises(RuntimeError, match="padded_mode must be False"):
        torch_npu.npu_moe_token_permute(t(4, 16), t(4, 2, dtype=INT32), None, True)
    with pytest.raises(RuntimeError, match="num_experts must be between 1 and 2048, but is 2049"):
        torch_npu.npu_moe_compute_expert_tokens(t(4, dtype=INT32), 2049)


AT_RUN_TIME: list[tuple[Callable[[], Any], str]] = [
    (lambda: init(expert_idx=t(4, 2, dtype=INT32) * 9), "expert_idx has 9, but there are 8 experts"),
    (lambda: quant(expert_num=1), "expert_idx has 1 to 1, but there are 1 experts"),
    (lambda: first(row_idx=t(4, 2, dtype=INT32) * 8), "row_idx must be between 0 and 7"),
    (lambda: finalize(expanded_src_to_dst_row=t(8, dtype=INT32) * -1), "expanded_row_idx has -1 to -1, but"),
    (lambda: finalize(expanded_src_to_dst_row=t(8, dtype=INT32) * 8), "but expanded_x has 8 rows"),
    (lambda: unpermute(sorted_indices=t(8, dtype=INT32) * -1), "sorted_indices has -1 to -1"),
    (lambda: re_route(expert_token_num_per_rank=t(3, 3, dtype=INT32)), "must add up to the 6 tokens"),
    (lambda: torch_npu.npu_moe_token_permute(t(4, 16), t(4, 2, dtype=INT32) * -1), "indices must be between 0 and"),
    (
        lambda: torch_npu.npu_moe_compute_expert_tokens(torch.tensor([1, 0], dtype=INT32).npu(), 2),
        "sorted_experts must ascend and be between 0 and 2",
    ),
]


@pytest.mark.parametrize("number", range(len(AT_RUN_TIME)))
def test_contents(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    function, reason = AT_RUN_TIME[number]
    function()
    with pytest.raises(RuntimeError, match="507015") as error:
        torch.npu.synchronize()
    assert reason in str(error.value) + capfd.readouterr().err
    (t(2) + 1).cpu()  # and the device works on


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
    command = [sys.executable, "-c", "from hal.cli import main; main(prog_name='hal')"]
    command += ["emulate", "--soc", soc, "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)
    refused = set(done.stdout.splitlines())
    asked = {line.split('"')[1] for line in SCRIPT.splitlines() if '": lambda' in line}
    if soc.startswith("Ascend910"):
        assert refused == ONLY_950, done.stderr
    elif soc.startswith("Ascend310P"):
        assert refused == asked - TAKEN_310P, done.stderr
    else:
        assert refused == {"softmax 2064 experts", "init active 0", "init uncounted", "init smooth"}, done.stderr
