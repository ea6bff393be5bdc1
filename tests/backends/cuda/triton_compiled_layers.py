"""Tests that compile the Triton kernels of recurrent layers and of projections of 4 and 8 bits for GPUs that are not
present, at sizes of Qwen3-Next-80B-A3B and Qwen3-8B.

Run by test_triton_kernels.py in a subprocess.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hal.backends.triton import KERNELS
from helpers.triton_checking import RECURRENT
from helpers.triton_compiling import Compiling, Launcher, check_fits, check_product, compiled, empty
from torch import Tensor

from hal.ops.forms import Form

pytest_plugins = ("helpers.triton_compiling",)

KEY_HEADS, HEADS, HEAD_DIM = 16, 32, 128
CHANNELS = (2 * KEY_HEADS + HEADS) * HEAD_DIM
HIDDEN, INNER = 4096, 12288


def steps(sequences: int, saves: int = 0) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    slots, starts = torch.zeros(sequences, dtype=torch.int32), torch.zeros(sequences + 1, dtype=torch.int32)
    return slots, torch.zeros(sequences, saves, dtype=torch.int32) if saves else None, starts, starts


def recurrent(tokens: int, sequences: int, saves: int = 0) -> dict[str, tuple[Any, ...]]:
    """Arguments of every kernel of recurrent layers."""
    key, value, gates = empty(tokens, KEY_HEADS, HEAD_DIM), empty(tokens, HEADS, HEAD_DIM), empty(tokens, HEADS)
    state, rest = torch.empty(2, HEADS, HEAD_DIM, HEAD_DIM), steps(sequences, saves)
    rates = torch.zeros(HEADS)
    return {
        "causal_conv1d": (
            empty(tokens, CHANNELS), empty(4, CHANNELS), None, empty(2, 3, CHANNELS), *rest, True
        ),
        "delta_rule_gates": (gates, gates, rates, rates),
        "gated_delta_rule": (key, key, value, gates.float(), gates, state, *rest, 0.1),
        "gated_rms_norm": (value, value, empty(HEAD_DIM), 1e-6),
        "l2_norm": (key, 1e-6),
    }  # fmt: skip


def test_a_decode_fits_and_moves_16_bytes_at_once(compiling: Compiling) -> None:
    arguments = recurrent(48, 48)
    assert arguments.keys() == RECURRENT
    for name, sample in arguments.items():
        (kernel,) = compiled(compiling, name, *sample)
        check_fits(kernel)
        if name != "delta_rule_gates":
            assert re.search(r"ld\.global[.\w:]*\.v4\.b32", kernel.ptx), f"{name} loads less than 16 bytes at a time"


def test_a_prefill_uses_tensor_cores(compiling: Compiling) -> None:
    for saves in (0, 2):
        kernels = compiled(compiling, "gated_delta_rule", *recurrent(2048, 1, saves)["gated_delta_rule"])
        products = {kernel.name: kernel for kernel in kernels if kernel.name != "_recur"}
        assert sorted(products) == ["_pass", "_solve"]
        for kernel in products.values():
            assert re.search(r"(mma\.sync|wgmma)[.\w]*\.tf32", kernel.ptx), kernel.name
            assert kernel.spilled <= 2048, f"{kernel.name} spills {kernel.spilled} bytes"


def test_the_launches_of_recurrent_layers(driver: Compiling) -> None:
    """As the reference page says."""
    driver.capability = 90
    for tokens, expected in ((8, ["_recur"]), (2048, ["_recur", "_solve", "_pass"])):
        Launcher.launched.clear()
        KERNELS["gated_delta_rule"](*recurrent(tokens, 1)["gated_delta_rule"])
        assert Launcher.launched == expected


def packed(rows: int, form: Form, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """Arguments of a projection with a weight in a form."""
    weight, shape = empty(HIDDEN, form.packed(INNER), dtype=form.kind.dtype), form.blocks(HIDDEN, INNER)
    scale = empty(*shape, dtype=torch.float32 if form.scales == "float" else torch.uint8)
    zero = empty(*shape, dtype=torch.int8) if form.zero_points else None
    return empty(rows, INNER, dtype=dtype), weight, None, scale, zero, None, None, form


@pytest.mark.parametrize("rows", [8, 32])
def test_low_bits_fit(rows: int, compiling: Compiling) -> None:
    """Decodes; for more rows a launch widens the weight."""
    for form, dtype in (
        (Form("int4", columns=128), torch.bfloat16),
        (Form("int4", columns=32, zero_points=True), torch.float16),
        (Form("int8"), torch.bfloat16),
        (Form("float8", rows=128, columns=128), torch.bfloat16),
        (Form("float4", columns=32, scales="e8m0"), torch.bfloat16),
    ):
        (kernel,) = compiled(compiling, "linear", *packed(rows, form, dtype))
        check_product(kernel)


def test_one_compilation_serves_all_decodes(driver: Compiling) -> None:
    """A step must not wait for a compiler because its batch is new."""
    driver.capability, before = 90, len(driver.compiled)
    for tokens in (1, 2, 7, 16):
        compiled(driver, "linear", *packed(tokens, Form("int8", columns=64)))
        arguments = recurrent(tokens, tokens)
        query, key, value, *gates = arguments["gated_delta_rule"]
        state = torch.empty(2, HEADS, HEAD_DIM, 64)
        compiled(driver, "gated_delta_rule", query[..., :64], key[..., :64], value, *gates[:2], state, *gates[3:])
        x, *others = arguments["causal_conv1d"]
        compiled(driver, "causal_conv1d", x, others[0][:3], None, others[2][:, :2].contiguous(), *others[3:])
    names = sorted(kernel.name for kernel in driver.compiled[before:])
    assert names == ["_convolve", "_project", "_recur"]
