"""Tests for every ATen operation of the emulated CANN, through the real torch_npu, against ATen on the CPU in float64.

The tables in helpers/emulator define the cases: shapes (with sizes 0 and 1), strides, offsets, values and dtypes. A
test's id ends in its seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.emulator.aten_cases import CASES
from helpers.emulator.aten_draw import Case, Draw
from helpers.thorough import DRAW, thorough
from torch import Tensor

SEEDS = (0, 1)
# For one rounding to the dtype; for float32, for a short chain of roundings.
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.float16: (1e-3, 1e-5), torch.bfloat16: (8e-3, 1e-5)}


def parameters() -> list[Any]:
    return [*drawn()]


def drawn() -> Iterator[Any]:
    for case in CASES:
        for dtype in case.dtypes:
            for seed in SEEDS:
                name = str(dtype).removeprefix("torch.")
                yield pytest.param(case, dtype, seed, id=f"{case.name}-{name}-seed{seed}")


def on_device(argument: Any) -> Any:
    """Copy a tensor to the NPU with the same strides and offset."""
    if not isinstance(argument, Tensor):
        return argument
    storage = torch.empty(argument.untyped_storage().nbytes(), dtype=torch.uint8).npu()
    base = torch.empty(0, dtype=argument.dtype, device="npu").set_(storage.untyped_storage())
    view = base.as_strided(argument.shape, argument.stride(), argument.storage_offset())
    return view.copy_(argument.contiguous())


def reference(argument: Any) -> Any:
    """Convert floating-point values to float64 and leave others."""
    if isinstance(argument, Tensor):
        return argument.double() if argument.is_floating_point() else argument.clone()
    return argument


def tensors(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else list(result)


def check(actual: Tensor, expected: Tensor, like: Tensor, scale: float) -> None:
    """Check that `actual` has the dtype and shape of `like`, and equals `expected` within rounding."""
    assert actual.dtype == like.dtype
    assert actual.shape == like.shape
    if actual.is_floating_point():
        rtol, atol = TOLERANCE[actual.dtype]
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=rtol * scale, atol=atol * scale, equal_nan=True, check_dtype=False
        )
    else:
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=0)


@thorough(DRAW, r"seed[1-9]")
@pytest.mark.parametrize(("case", "dtype", "seed"), parameters())
def test_operation(case: Case, dtype: torch.dtype, seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    draw = Draw(zlib.crc32(f"{case.name} {dtype} {seed}".encode()), dtype, case.dims, case.empty)
    arguments = [maker(draw) for maker in case.inputs]
    on_npu = [on_device(each) for each in arguments]
    in_float64 = [reference(each) for each in arguments]

    actual = tensors(case.function(*on_npu))
    expected = tensors(case.function(*in_float64))
    typed = tensors(case.function(*arguments))
    if case.inplace:
        actual, expected, typed = [on_npu[0]], [in_float64[0]], [arguments[0]]

    assert "fall back to run on the CPU" not in capfd.readouterr().err  # torch_npu logs this once for each operation
    assert len(actual) == len(expected)
    for one, right, like in zip(actual, expected, typed, strict=True):
        check(one.cpu(), right, like, case.scale)


@thorough(DRAW, r"seed[1-9]")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("seed", SEEDS, ids=[f"seed{seed}" for seed in SEEDS])
@pytest.mark.parametrize("case", [case for case in CASES if case.out], ids=[case.name for case in CASES if case.out])
def test_out(case: Case, dtype: torch.dtype, seed: int) -> None:
    """`out=` holds NaN or true before, and is a part of a larger tensor whose rest must not change."""
    draw = Draw(zlib.crc32(f"out {case.name} {dtype} {seed}".encode()), dtype, case.dims, case.empty)
    arguments = [maker(draw) for maker in case.inputs]
    like = case.function(*arguments)
    around = torch.full((*like.shape, 3), 1 if like.dtype == torch.bool else torch.nan, dtype=like.dtype).npu()
    out = around[..., 1]

    returned = case.function(*[on_device(each) for each in arguments], out=out)

    assert returned is out
    check(out.cpu(), case.function(*[reference(each) for each in arguments]), like, case.scale)
    untouched = around.cpu()[..., 0]
    assert bool(untouched.all() if like.dtype == torch.bool else untouched.isnan().all())
