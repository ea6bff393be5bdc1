"""What the hardware refuses of grouped products, and what the emulated CANN has not: refused, with the reason.

Each case changes a call that works in one thing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_npu
from helpers.thorough import PROCESSES, thorough
from support.children import on_soc
from support.grouped import in_layout
from support.ones import bf16, f32, half, i8, i32, i64
from support.refusals import Row, check_fails, check_refused, check_works
from torch import Tensor

pytestmark = pytest.mark.usefixtures("internal_formats")

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8


def nz(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return in_layout(torch.ones(shape, dtype=dtype), "nz")


def counts(*values: Any) -> Tensor:
    return torch.tensor(values).npu()


def plain(**changes: Any) -> Any:
    """Six rows in two groups."""
    arguments: dict[str, Any] = {
        "x": [half(6, 32)],
        "weight": [half(2, 32, 16)],
        "group_list": counts(2, 6),
        "group_type": 0,
        "split_item": 2,
    }
    arguments |= changes
    return torch_npu.npu_grouped_matmul(arguments.pop("x"), arguments.pop("weight"), **arguments)


def several(**changes: Any) -> Any:
    """One x, two weights."""
    return plain(**{"weight": [half(32, 16), half(32, 16)], **changes})


def apart(**changes: Any) -> Any:
    """Two of each."""
    arguments = {"x": [half(2, 32), half(4, 32)], "split_item": 0, "group_type": -1, "group_list": None}
    return several(**{**arguments, **changes})


def inner(**changes: Any) -> Any:
    """Groups of the inner dimension."""
    return plain(**{"x": [half(6, 4).t()], "weight": [half(6, 16)], "group_type": 2, **changes})


def int8(**changes: Any) -> Any:
    arguments = {
        "x": [i8(6, 32)],
        "weight": [i8(2, 32, 32)],
        "scale": [bf16(2, 32)],
        "per_token_scale": [f32(6)],
        "output_dtype": BF16,
    }
    return plain(**{**arguments, **changes})


def weight_only(**changes: Any) -> Any:
    arguments = {"weight": [i8(2, 32, 16)], "antiquant_scale": [half(2, 16)], "antiquant_offset": [half(2, 16)]}
    return plain(**{**arguments, **changes})


def int4(**changes: Any) -> Any:
    arguments = {"weight": [i32(2, 32, 2)], "antiquant_scale": [half(2, 4, 16)], "antiquant_offset": None}
    return weight_only(**{**arguments, **changes})


def mixed(**changes: Any) -> Any:
    """An int4 weight beside int8 x."""
    arguments: dict[str, Any] = {
        "x": [i8(6, 512)],
        "weight": [i32(2, 512, 2)],
        "scale": [i64(2, 2, 16)],
        "bias": [f32(2, 16)],
        "per_token_scale": [f32(6)],
        "group_list": counts(2, 4),
        "group_list_type": 1,
        "output_dtype": BF16,
    }
    return plain(**{**arguments, **changes})


def numbers(**changes: Any) -> Any:
    """A list of numbers."""
    arguments: dict[str, Any] = {"x": [half(6, 32)], "weight": [half(32, 16), half(32, 16)], "group_list": [2, 6]}
    arguments |= {"split_item": 2, **changes}
    return torch_npu.npu_grouped_matmul(arguments.pop("x"), arguments.pop("weight"), **arguments)


def swiglu(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "x": i8(6, 32),
        "weight": nz(2, 32, 64, dtype=INT8),
        "group_list": counts(2, 6),
        "weight_scale": f32(2, 64),
        "x_scale": f32(6),
    }
    return torch_npu.npu_grouped_matmul_swiglu_quant(**{**arguments, **changes})


def swiglu_2(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "x": i8(6, 32),
        "weight": [nz(2, 32, 64, dtype=INT8)],
        "group_list": counts(2, 6),
        "weight_scale": [f32(2, 64)],
        "x_scale": f32(6),
    }
    return torch_npu.npu_grouped_matmul_swiglu_quant_v2(**{**arguments, **changes})


def swiglu_8_4(**changes: Any) -> Any:
    """An int4 weight beside int8 x."""
    arguments: dict[str, Any] = {
        "x": i8(6, 64),
        "weight": [i32(2, 64, 8)],
        "weight_scale": [i64(2, 64)],
        "weight_assist_matrix": [f32(2, 64)],
    }
    return swiglu_2(**{**arguments, **changes})


def swiglu_4_4(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"x": i32(6, 8), "weight": [i32(2, 64, 8)], "weight_scale": [f32(2, 64)]}
    return swiglu_2(**{**arguments, **changes})


def clipped(**changes: Any) -> Any:
    arguments = {"x": half(6, 32), "group_index": counts(2, 1)}
    return torch_npu.npu_clipped_swiglu(**{**arguments, **changes})


def cases() -> Iterator[Row]:
    yield plain, {"group_type": 0, "split_item": 1, "group_list": counts(2, 6)}, "one y|split_item 2 or 3"
    yield plain, {"group_list": counts(2, 6).int()}, "group_list must be int64"
    yield plain, {"group_list": counts(2, 4, 6)}, "group_list has 3 groups, but there are weights for 2"
    yield plain, {"group_list": counts(2, 6), "group_list_type": 2}, r"group_list must be \[E, 2\]"
    yield plain, {"group_list_type": 3}, "group_list_type must be 0"
    yield plain, {"act_type": 5}, "act_type goes with int8 x and weight"
    yield plain, {"act_type": 3}, "act_type must be 0, 1, 2, 4 or 5"
    yield plain, {"x": [half(6, 48)]}, "x has K = 48, but weight has 32 rows"
    yield plain, {"x": [half(32, 6).t()]}, "x must not be transposed"
    yield plain, {"weight": [half(32, 16)], "group_list": counts(6)}, "weight must be one tensor of 3 dimensions"
    yield plain, {"weight": [f32(2, 32, 16)]}, "weight must be of x's dtype, int8, or int4"
    yield plain, {"output_dtype": torch.float32}, "y must have x's dtype"
    yield plain, {"bias": [f32(2, 16)]}, "bias must be float32 for bfloat16 x, and else of x's dtype"
    yield plain, {"bias": [half(16)]}, "bias must have shape"
    yield plain, {"scale": [half(2, 16)]}, "scales and offsets go with quantized x or weight"
    yield plain, {"weight": [nz(1, 32, 16)], "group_list": counts(6), "group_list_type": 1}, "must not have 1 group"
    yield plain, {"weight": [half(2, 32, 65536)]}, "the last dimension of weight must be below 65536"
    yield several, {"weight": [half(32, 16), half(32, 32)]}, "the weights must have one N"
    changes = {"weight": [half(32, 16), half(16, 32).t()]}
    yield several, changes, "either all tensors of weight are transposed, or none"
    yield several, {"bias": [half(16)]}, "must have as many tensors as weight"
    yield several, {"x": [f32(6, 32)], "weight": [f32(32, 16)] * 2}, "float32 is for x, weight"
    yield apart, {"split_item": 2}, "group_type -1 goes with split_item 0 or 1"
    yield inner, {"x": [half(4, 6)]}, "x must be transposed where group_type is 2"
    yield inner, {"bias": [half(16)]}, "bias does not go with group_type 2"
    yield inner, {"weight": [nz(6, 16)]}, "a weight in FRACTAL_NZ goes with group_type -1 or 0"
    yield int8, {"output_dtype": HALF}, "a float16 y needs a float32 scale, not BFloat16"
    yield int8, {"scale": [f32(2, 32)]}, "a bfloat16 y needs a bfloat16 scale, not Float"
    yield int8, {"scale": [bf16(32)]}, r"scale must be \[E, N\]"
    yield int8, {"scale": None}, "a bfloat16 y needs a bfloat16 scale"
    yield int8, {"output_dtype": None}, "per_token_scale goes with a y of bfloat16 or float16"
    yield int8, {"output_dtype": None, "per_token_scale": None}, "an int8 y needs an int64 scale"
    yield int8, {"per_token_scale": [f32(3)]}, r"per_token_scale must be float32 and \[M\]"
    yield int8, {"bias": [f32(2, 32)]}, "bias must be int32 here"
    yield (int8, {"weight": [i8(32, 32)] * 2, "scale": [bf16(32)] * 2}, "int8 x goes with group_type 0")
    yield mixed, {"bias": None}, "need a float32 bias: 8 times the sums"
    yield mixed, {"scale": [f32(2, 2, 16)]}, "int8 x and int4 weight need an int64 scale"
    yield mixed, {"scale": [i64(2, 4, 16)]}, r"scale must be \[E, K / 256, N\] or \[E, 1, N\]"
    yield mixed, {"per_token_scale": None}, r"per_token_scale must be float32 and \[M\]"
    yield mixed, {"group_list_type": 0}, "int8 x and int4 weight need group_list_type 1"
    yield mixed, {"weight": [i32(2, 16, 64).transpose(1, 2)]}, "must be .* and not transposed"
    yield mixed, {"offset": [f32(2, 1, 16)]}, "offset, and several tensors .* are not emulated"
    changes = {
        "output_dtype": INT8,
        "per_token_scale": None,
        "scale": [i64(2, 32)],
        "weight": [nz(2, 32, 32, dtype=INT8)],
    }
    yield int8, changes, "an int8 y does not go with a weight in FRACTAL_NZ"
    yield int8, {"tuning_config": [7]}, "from 0 to all"
    yield weight_only, {"antiquant_offset": None}, "an int8 weight needs antiquant_offset"
    yield weight_only, {"antiquant_scale": [bf16(2, 16)]}, "antiquant_scale must be given, of x's dtype"
    yield weight_only, {"antiquant_scale": [half(2, 4, 16)]}, "for groups of rows goes with int4 weights"
    yield weight_only, {"weight": [nz(2, 32, 16, dtype=INT8)]}, "must be in ND"
    yield int4, {"antiquant_scale": [half(2, 5, 16)]}, "must divide K = 32"
    yield int4, {"antiquant_offset": [half(2, 4, 16)]}, "goes with an antiquant_scale for each column"
    yield numbers, {"group_list": [2, 5]}, "group_list must end with the rows of x, 6, not 5"
    yield numbers, {"x": [i8(6, 32)], "weight": [i8(32, 16)] * 2}, "where group_list is a tensor"
    yield swiglu, {"weight": i8(2, 32, 64)}, "an int8 weight must be in FRACTAL_NZ"
    transposed = nz(2, 64, 32, dtype=INT8).transpose(1, 2)
    yield swiglu, {"weight": transposed}, "an int8 weight must not be transposed"
    yield swiglu, {"group_list": counts(6)}, "group_list must have shape"
    yield swiglu, {"x_scale": half(6)}, "x_scale must be one of Float, but is Half"
    yield swiglu, {"bias": f32(2, 64)}, "bias and offset do not go with an int8 weight"
    yield swiglu, {"weight": nz(2, 32, 10304, dtype=INT8), "weight_scale": half(2, 10304)}, "N must be at most 10240"
    yield swiglu_2, {"weight": [i8(2, 32, 64)]}, "an int8 weight must be in FRACTAL_NZ"
    yield swiglu_2, {"group_list_type": 2}, "group_list_type must be 0 .* or 1"
    yield swiglu_2, {"dequant_mode": 1}, "dequant_mode must be 0"
    yield swiglu_2, {"smooth_scale": f32(2)}, "do not go with int8 x and weight"
    yield swiglu_2, {"weight": [i8(2, 2, 2, 8, 32)]}, "must be 16 x 32, but are .2, 2, 2, 8, 32."
    tiles = nz(2, 32, 64, dtype=INT8).view(2, 2, 2, 16, 32)
    yield swiglu_2, {"weight": [tiles.transpose(-1, -2)]}, "transposed tiles of a weight .* are not emulated"
    yield swiglu, {"weight": i32(2, 32, 8)}, "an int4 weight must be in FRACTAL_NZ"
    yield swiglu_8_4, {"weight_assist_matrix": None}, "needs a weight_assist_matrix"
    yield swiglu_8_4, {"weight_scale": [f32(2, 64)]}, "must be uint64 or int64"
    yield swiglu_8_4, {"weight_scale": [i64(2, 3, 64)], "dequant_mode": 1}, "must divide K = 64, but are 3"
    yield swiglu_8_4, {"weight_scale": [i64(2, 2, 64)]}, "dequant_mode must be 1 with a weight_scale for"
    yield swiglu_8_4, {"dequant_mode": 1}, "and otherwise 0, but is 1"
    yield swiglu_8_4, {"smooth_scale": f32(2)}, "smooth_scale goes with int4 x and weight"
    yield swiglu_8_4, {"tuning_config": [6]}, "tuning_config goes with int4 x"
    transposed = i32(2, 8, 64).transpose(1, 2)
    yield swiglu_8_4, {"weight": [transposed]}, "an int4 weight beside int8 x must not be transposed"
    yield swiglu_4_4, {"weight_assist_matrix": [f32(2, 64)]}, "goes with int8 x and an int4 weight"
    yield swiglu_4_4, {"smooth_scale": f32(2, 64)}, "smooth_scale must have shape .2, 32."
    yield swiglu_4_4, {"weight_scale": [i64(2, 2, 64)]}, "groups of rows with int4 x is not emulated"
    yield swiglu_4_4, {"weight": [i8(2, 64, 64)]}, "int4 x needs an int4 weight"
    wide = {"x": i32(6, 2500), "weight": [i32(2, 20000, 8)]}
    yield swiglu_4_4, wide, "K must be below 20000 with int4 weights, but is 20000"
    yield clipped, {"x": half(6, 31)}, "the dimension to split must be even"
    yield clipped, {"limit": -1.0}, "limit must be above 0"
    yield clipped, {"group_index": counts(2, 1).int()}, "group_index must be one of Long, but is Int"


def test_refusals() -> None:
    check_works((plain, several, apart, inner, int8, weight_only, int4, mixed, numbers))
    check_works((swiglu, swiglu_2, swiglu_8_4, swiglu_4_4, clipped))
    check_refused(cases())


def at_run_time() -> Iterator[Row]:
    """What only the contents of a list show."""
    yield plain, {"group_list": counts(2, 7)}, "group_list counts 7 rows, but there are 6"
    yield plain, {"group_list": counts(6, 2)}, "group_list gives group 1 -4 rows"
    yield plain, {"group_list": counts(2, -1), "group_list_type": 1}, "group_list gives group 1 -1 rows"
    yield plain, {"group_list": counts([0, 2], [2, 4]), "group_list_type": 2}, "group_list names group 2 of 2"
    yield plain, {"group_list": counts([0, 0], [1, 6]), "group_list_type": 2}, "the groups without rows last"
    rows_apart = {"x": [half(2, 32), half(4, 32)], "group_list": counts(3, 6)}
    yield several, rows_apart, "group_list gives group 0 3 rows, but its x has 2"
    yield clipped, {"group_index": counts(2, -1)}, "group_index has a negative element"


def test_contents(capfd: pytest.CaptureFixture[str]) -> None:
    check_fails(at_run_time(), capfd)


PRODUCT_LINES = """
import torch, torch_npu

torch.npu.config.allow_internal_format = True
HALF, BF16, FLOAT, INT8, INT64 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64

def t(*shape, dtype=HALF):
    return torch.ones(shape, dtype=dtype, device="npu")

def nz(*shape, dtype=HALF):
    return torch_npu.npu_format_cast(t(*shape, dtype=dtype), 29)

def product(x, weight, **more):
    more = {"group_list": torch.tensor([2, 6]).npu(), "group_type": 0, "split_item": 2, **more}
    (y,) = torch_npu.npu_grouped_matmul([x], [weight], **more)
    return y.float().sum().item()

def works(expected, *arguments, function=product, **more):
    assert function(*arguments, **more) == expected, function(*arguments, **more)

def fails(reason, *arguments, function=product, **more):
    try:
        function(*arguments, **more)
    except RuntimeError as error:
        assert reason in str(error), error
    else:
        raise AssertionError(f"{reason} was expected")

x, weight, x8, weight8 = t(6, 32), t(2, 32, 32), t(6, 32, dtype=INT8), t(2, 32, 32, dtype=INT8)
by_token = {"per_token_scale": [t(6, dtype=torch.float32)], "output_dtype": BF16}
swiglu = lambda *a, **k: torch_npu.npu_grouped_matmul_swiglu_quant_v2(*a, **k)[1].sum().item() > 0
groups = torch.tensor([2, 6]).npu()
"""

INFERENCE = """
works(6 * 32 * 32.0, x, weight)
fails("must be float16", t(6, 32, dtype=FLOAT), t(2, 32, 32, dtype=FLOAT))
fails("must be float16", x8, weight8, scale=[t(2, 32, dtype=BF16)], **by_token)
fails("group_list_type must be 0 or 1", x, weight, group_list=torch.tensor([[0, 2], [1, 4]]).npu(), group_list_type=2)
fails("multiple of 16", x, t(2, 32, 8))
fails("group_type 0", t(6, 4).t(), t(6, 16), group_type=2)
fails("is not for Ascend310P", x8, [weight8], [t(2, 32)], t(6, dtype=FLOAT), groups, function=swiglu)
fails("is not for Ascend310P", t(6, 32), function=torch_npu.npu_clipped_swiglu)
print("well")
"""

A5 = """
works(6 * 32 * 32.0, x, weight, bias=[t(2, 32, dtype=FLOAT) * 0])
works(6 * 32 * 32.0, t(6, 32, dtype=BF16), t(2, 32, 32, dtype=BF16), bias=[t(2, 32, dtype=BF16) * 0])
works(6 * 32 * 32.0, x, nz(2, 32, 32))
works(6 * 32 * 32.0, x8, weight8, scale=[t(2, 32, dtype=FLOAT)], **by_token)
works(6 * 32 * 32.0, x8, weight8, scale=[t(2, dtype=BF16)], **by_token)
works(6 * 32 * 33.0, x8, weight8, scale=[t(2, 32, dtype=BF16)], bias=[t(2, 32, dtype=BF16)], **by_token)
works(6 * 32 * 32.0, x8, nz(2, 32, 32, dtype=INT8), scale=[t(2, 32, dtype=FLOAT)], **by_token)
works(6 * 32 * 32.0, x, weight8, antiquant_scale=[t(2, 32)])
fails("group_list_type 2 goes with int8", x, weight, group_list=torch.tensor([[0, 2], [1, 4]]).npu(), group_list_type=2)
fails("multiples of 32 bytes", x, nz(2, 32, 24))
fails("32, 64, 128 or 256", x, t(2, 32, 4, dtype=torch.int32), antiquant_scale=[t(2, 2, 32)])
works(True, x8, [weight8], [t(2, 32)], t(6, dtype=FLOAT), groups, function=swiglu)
fails("must be in ND", x8, [nz(2, 32, 32, dtype=INT8)], [t(2, 32)], t(6, dtype=FLOAT), groups, function=swiglu)
fails("are for Atlas A2 and A3", x8, [t(2, 32, 4, dtype=torch.int32)], [t(2, 4)], t(6, dtype=FLOAT), groups,
      function=swiglu)
fails("is for Atlas A2 and A3", x8, nz(2, 32, 32, dtype=INT8), groups, t(2, 32, dtype=FLOAT), t(6, dtype=FLOAT),
      function=torch_npu.npu_grouped_matmul_swiglu_quant)
torch_npu.npu_clipped_swiglu(t(6, 32))
torch.npu.synchronize()
print("well")
"""


@thorough(PROCESSES)
@pytest.mark.parametrize(("soc", "script"), [("Ascend310P3", INFERENCE), ("Ascend950PR_9599", A5)])
def test_product_line(soc: str, script: str, clean: dict[str, str]) -> None:
    assert on_soc(soc, PRODUCT_LINES + script, clean) == "well\n"
