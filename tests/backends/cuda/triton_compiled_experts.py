"""Tests that compile the Triton kernels of experts for GPUs that are not present, at sizes of Qwen3-30B-A3B.

Run by test_triton_kernels.py in a subprocess.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from helpers.triton_compiling import Compiled, Compiling, Launcher, check_fits, check_product, compiled, empty
from torch import Tensor

from hal.bench.plan import SHAPES
from hal.ops import GatedActivation
from hal.ops.form_samples import INT8
from hal.ops.forms import Form

pytest_plugins = ("helpers.triton_compiling",)

CONFIG = SHAPES["qwen3-30b-a3b-4-layers"]
HIDDEN, WIDTH = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
NUM_EXPERTS, TOP_K = CONFIG["num_experts"], CONFIG["num_experts_per_tok"]
TOKENS = (8, 512, 4096)
"""A decode, and prefills of few tokens and of many."""
PLAIN = (None, None, GatedActivation())


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (empty(NUM_EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype), empty(NUM_EXPERTS, HIDDEN, WIDTH, dtype=dtype))


def routed(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return empty(tokens, TOP_K, dtype=dtype), torch.zeros(tokens, TOP_K, dtype=torch.int32)


def scales() -> tuple[Tensor, Tensor]:
    return torch.ones(NUM_EXPERTS, 2 * WIDTH, 1), torch.ones(NUM_EXPERTS, HIDDEN, 1)


def grouped(driver: Compiling, form: Form, x: Tensor, weight: Tensor, counts: Tensor, scale: Tensor) -> list[Compiled]:
    return compiled(driver, "grouped_linear", x, weight, counts, None, scale, None, None, None, form)


def float_mlp(tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return empty(tokens, HIDDEN, dtype=dtype), *weights(dtype), *routed(tokens, dtype), *PLAIN


def check_products(kernels: list[Compiled], spilled: int) -> None:
    products = [kernel for kernel in kernels if kernel.name == "_project"]
    assert products
    for kernel in products:
        check_product(kernel, spilled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_fit(dtype: torch.dtype, compiling: Compiling) -> None:
    kernels = [kernel for tokens in TOKENS for kernel in compiled(compiling, "expert_mlp", *float_mlp(tokens, dtype))]
    check_products(kernels, 16 if compiling.capability == 80 else 0)
    for kernel in kernels:
        # Sums stay in the tensor cores' accumulators: at most 32 additions are those of the activation.
        assert len(re.findall(r"add(?:\.rn)?\.f32", kernel.ptx)) <= 32, kernel.name


def test_int8_products_fit(compiling: Compiling) -> None:
    (gate_up_scale, down_scale), (gate_up, down), one = scales(), weights(torch.int8), torch.ones(1)
    counts, kernels = torch.zeros(NUM_EXPERTS, dtype=torch.int64), []
    for tokens in TOKENS:
        x, route = empty(tokens, HIDDEN), routed(tokens, torch.bfloat16)
        both = gate_up, gate_up_scale, down, down_scale
        kernels += compiled(compiling, "quant_expert_mlp_dynamic", x, *both, *route)
        kernels += compiled(
            compiling, "quant_expert_mlp_static", x, one, None, *both[:2], None, one, None, *both[2:], None, *route
        )
        kernels += grouped(compiling, INT8, empty(tokens * TOP_K, HIDDEN), gate_up, counts, gate_up_scale)
    check_products(kernels, 16)


def test_packed_products_fit(compiling: Compiling) -> None:
    counts, kernels = torch.zeros(NUM_EXPERTS, dtype=torch.int64), []
    packed = torch.empty((NUM_EXPERTS, WIDTH, HIDDEN // 2), dtype=torch.uint8)
    exponents = torch.empty((NUM_EXPERTS, WIDTH, HIDDEN // 32), dtype=torch.uint8)
    scale = torch.empty(NUM_EXPERTS, WIDTH, HIDDEN // 128)
    for tokens in (8, 400):
        x = empty(tokens * TOP_K, HIDDEN)
        kernels += grouped(compiling, Form("float4", columns=32, scales="e8m0"), x, packed, counts, exponents)
        kernels += grouped(compiling, Form("int4", columns=128), x, packed.view(torch.int32), counts, scale)
    assert len(kernels) == 4
    check_products(kernels, 0)


def test_float32_fits(compiling: Compiling) -> None:
    """Without tensor cores, whose float32 is shorter."""
    for tokens in TOKENS:
        for kernel in compiled(compiling, "expert_mlp", *float_mlp(tokens, torch.float32)):
            check_fits(kernel)
            assert not re.search(r"tf32", kernel.ptx)


def test_routing_and_copies_fit(compiling: Compiling) -> None:
    logits, bias = empty(48, 256), torch.ones(256)
    for arguments in (
        (logits[:, :128].contiguous(), None, 8, False, True, 1.0, 1, 1, 1),  # Qwen3-30B-A3B
        (logits, bias, 8, True, True, 2.5, 8, 4, 2),  # DeepSeek-V3
    ):
        (kernel,) = compiled(compiling, "topk_route", *arguments)
        assert kernel.spilled == 0
    # Six experts per token: other tests compile for eight, and Triton keeps what it compiled.
    kernels = []
    for tokens in (4, 480):
        experts = torch.zeros(tokens, 6, dtype=torch.int32)
        kernels += compiled(compiling, "expert_permute", empty(tokens, HIDDEN), experts, 130)
        rows, weights = empty(tokens * 6, HIDDEN), empty(tokens, 6)
        kernels += compiled(compiling, "expert_unpermute", rows, experts.flatten(), weights)
    assert [kernel.name for kernel in kernels] == ["_rank", "_spread", "_gather", "_histogram", "_rank"]
    assert all(kernel.spilled == 0 for kernel in kernels)
    for kernel in kernels[1:3]:
        assert re.search(r"ld\.global[.\w:]*\.v4\.b32", kernel.ptx), f"{kernel.name} reads less than 16 bytes at once"
        assert re.search(r"st\.global[.\w:]*\.v[24]\.b32", kernel.ptx), kernel.name


def test_consumer_gpus_have_the_shared_memory(driver: Compiling) -> None:
    """Of which they have least; Triton refuses what does not fit."""
    driver.capability = 86
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in TOKENS:
            assert compiled(driver, "expert_mlp", *float_mlp(tokens, dtype)) or dtype is torch.float32
    (gate_up_scale, down_scale), (gate_up, down) = scales(), weights(torch.int8)
    for tokens in TOKENS:
        arguments = gate_up, gate_up_scale, down, down_scale, *routed(tokens, torch.bfloat16)
        assert compiled(driver, "quant_expert_mlp_dynamic", empty(tokens, HIDDEN), *arguments)


def test_one_compilation_serves_all_decodes(driver: Compiling) -> None:
    """Divisible by 16 or not; 1 too. A step must not wait for a compiler because its batch is new."""
    driver.capability, before = 90, len(driver.compiled)
    for tokens in (1, 2, 7, 8):
        compiled(driver, "topk_route", empty(tokens, 64), None, 4, False, True, 1.0, 1, 1, 1)
        x, gate_up, down = empty(tokens, 512), empty(64, 256, 512), empty(64, 512, 128)
        route = empty(tokens, 4), torch.zeros(tokens, 4, dtype=torch.int32)
        compiled(driver, "expert_mlp", x, gate_up, down, *route, *PLAIN)
    names = sorted(kernel.name for kernel in driver.compiled[before:])
    assert names == ["_gather", "_project", "_project", "_rank", "_route"]


def test_the_launches_of_an_mlp(driver: Compiling) -> None:
    """As the reference page says."""
    driver.capability = 90
    (gate_up_scale, down_scale), (gate_up, down), one = scales(), weights(torch.int8), torch.ones(1)
    route, x = routed(8, torch.bfloat16), empty(8, HIDDEN)
    rest = ["_project", "_project", "_gather"]
    for name, arguments, expected in (
        ("expert_mlp", float_mlp(64, torch.bfloat16), ["_rank", *rest]),
        ("expert_mlp", float_mlp(65, torch.bfloat16), ["_histogram", "_rank", *rest]),
        (
            "quant_expert_mlp_dynamic",
            (x, gate_up, gate_up_scale, down, down_scale, *route),
            ["_quantize", "_rank", "_project", "_quantize", *rest[1:]],
        ),
        (
            "quant_expert_mlp_static",
            (x, one, None, gate_up, gate_up_scale, None, one, None, down, down_scale, None, *route),
            ["_rank", "_quantize", *rest],
        ),
    ):
        Launcher.launched.clear()
        KERNELS[name](*arguments)
        assert Launcher.launched == expected, name
