"""Tests for every ATen operation of the emulated CANN, through the real torch_npu, against ATen on the CPU in float64.

torch's own samples of operations (OpInfo) have their shapes, with sizes 0 and 1, their values and options. The tables
in support/ add what torch has no samples of. All tensors have drawn strides and offsets.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.thorough import DTYPE, EXHAUSTIVE, thorough
from support.aten_cases import CASES, FLOATING, OPERATIONS, SCALES
from support.aten_draw import ALL, FLOATS, Case, Draw
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, SampleInput, UnaryUfuncInfo
from torch.utils._pytree import tree_leaves, tree_map

SEEDS = (0, 1)
# For one rounding to the dtype; for float32, and float64, which some kernels compute in it, for a short chain of them.
TOLERANCE = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (8e-3, 1e-5)}
TOLERANCE |= dict.fromkeys((torch.float32, torch.float64), (2e-6, 2e-6))
SAMPLES = 6
"""How many of torch's samples of an operation and a dtype run."""
SCALE = 4
"""The factor on the tolerance of most operations, of a few roundings."""
INFOS = {f"{each.name}.{each.variant_test_name}".rstrip("."): each for each in op_db}


def dtypes_of(name: str) -> list[torch.dtype]:
    return [each for each in (FLOATS if name in FLOATING else ALL) if each in INFOS[name].dtypes]


def samples_of(name: str, dtype: torch.dtype, seed: str, most: int) -> list[SampleInput]:
    """Return some of torch's samples, without what it adds for its own reports, which takes longer than all else."""
    torch.manual_seed(zlib.crc32(seed.encode()))
    random.seed(seed)
    found = list(INFOS[name].sample_inputs_func(INFOS[name], "cpu", dtype, requires_grad=False))
    return found[:: -(-len(found) // most) or 1]


def drawn() -> list[Any]:
    return [
        pytest.param(case, dtype, seed, id=f"{case.name}-{str(dtype).removeprefix('torch.')}-seed{seed}")
        for case in CASES
        for dtype in case.dtypes
        for seed in SEEDS
    ]


def on_device(argument: Any) -> Any:
    """Copy a tensor to the NPU with the same strides and offset. Other arguments that name the CPU name the NPU."""
    if not isinstance(argument, Tensor):
        return "npu" if argument == "cpu" or argument == torch.device("cpu") else argument
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
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


def check(actual: Tensor, expected: Tensor, like: Tensor, scale: float) -> None:
    """Check that `actual` has the dtype and shape of `like`, and equals `expected` within rounding."""
    assert actual.dtype == like.dtype
    assert actual.shape == like.shape
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if actual.is_floating_point():
        rtol, atol = TOLERANCE[actual.dtype]
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=rtol * scale, atol=atol * scale, equal_nan=True, check_dtype=False
        )
    else:
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=0)


def check_call(function: Callable[..., Any], arguments: Sequence[Any], scale: float, mutated: bool) -> bool:
    """Check a call with positional and keyword arguments. Return whether ATen takes it on the CPU."""
    given, options = arguments
    copies = [tree_map(each, (given, options)) for each in (on_device, reference)]
    try:
        expected, typed = (tensors(function(*each, **more)) for each, more in (copies[1], arguments))
    except (RuntimeError, TypeError, IndexError):
        return False
    actual = tensors(function(*copies[0][0], **copies[0][1]))
    if mutated:
        (((one, *_), _), ((right, *_), _)), (like, *_) = copies, given
        actual, expected, typed = [one], [right], [like]
    assert len(actual) == len(expected)
    for one, right, like in zip(actual, expected, typed, strict=True):
        check(one.cpu(), right, like, scale)
    return True


@pytest.fixture
def no_fallback(capfd: pytest.CaptureFixture[str]) -> Any:
    yield
    assert "fall back to run on the CPU" not in capfd.readouterr().err  # torch_npu logs this once for each operation


@thorough(DTYPE, "-(float16|bfloat16|int32)")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in OPERATIONS
        for dtype in dtypes_of(name)
    ],
)
@pytest.mark.usefixtures("no_fallback")
def test_samples_of_torch(name: str, dtype: torch.dtype) -> None:
    """Also of the form that mutates its first argument."""
    info, draw = INFOS[name], Draw(zlib.crc32(f"{name} {dtype}".encode()), dtype, 0, empty=True)

    def laid_out(argument: Any) -> Any:
        return draw.laid_out(argument) if isinstance(argument, Tensor) else argument

    ran = 0
    for sample in samples_of(name, dtype, f"{name} {dtype}", SAMPLES):
        for function in (info, info.inplace_variant):
            mutated = function is not info
            if function is not None and not (mutated and sample.broadcasts_input):
                arguments = tree_map(laid_out, ((sample.input, *sample.args), sample.kwargs))
                ran += check_call(function, arguments, SCALES.get(name, SCALE), mutated)
    assert ran


@thorough(EXHAUSTIVE, r"seed[1-9]")
@pytest.mark.parametrize(("case", "dtype", "seed"), drawn())
@pytest.mark.usefixtures("no_fallback")
def test_operation(case: Case, dtype: torch.dtype, seed: int) -> None:
    draw = Draw(zlib.crc32(f"{case.name} {dtype} {seed}".encode()), dtype, case.dims, case.empty)
    assert check_call(case.function, ([maker(draw) for maker in case.inputs], {}), case.scale, case.inplace)


def taking_out() -> Iterator[Any]:
    for name in OPERATIONS:
        info = INFOS[name]
        if info.supports_out and (name in ("mm", "bmm") or isinstance(info, UnaryUfuncInfo | BinaryUfuncInfo)):
            for dtype in FLOATS[:2]:
                if dtype in info.dtypes:
                    yield pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("name", "dtype"), taking_out())
def test_out(name: str, dtype: torch.dtype) -> None:
    """`out=` holds NaN or true before, and is a part of a larger tensor whose rest must not change."""
    for sample in samples_of(name, dtype, f"out {name} {dtype}", 2):
        arguments = sample.input, *sample.args
        like = INFOS[name](*arguments, **sample.kwargs)
        around = torch.full((*like.shape, 3), 1 if like.dtype == torch.bool else torch.nan, dtype=like.dtype).npu()
        out = around[..., 1]

        returned = INFOS[name](*tree_map(on_device, arguments), **sample.kwargs, out=out)

        assert returned is out
        check(out.cpu(), INFOS[name](*tree_map(reference, arguments), **sample.kwargs), like, SCALES.get(name, SCALE))
        untouched = around.cpu()[..., 0]
        assert bool(untouched.all() if like.dtype == torch.bool else untouched.isnan().all())
