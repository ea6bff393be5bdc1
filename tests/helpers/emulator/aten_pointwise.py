"""Cases for pointwise functions, arithmetic, comparisons and activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from helpers.emulator.aten_draw import ALL, FLOATS, INTEGERS, NUMBERS, Case, broadcast, const, sized, tensor


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Call torch_npu's gelu, which has both forms; ATen's is always the tanh form on the NPU."""
    if x.device.type == "npu":
        return torch_npu.npu_gelu(x, approximate=approximate)
    return functional.gelu(x, approximate=approximate)


def unary() -> list[Case]:
    domains: dict[str, tuple[float, float]] = {
        **dict.fromkeys(("exp", "exp2", "expm1", "sin", "cos", "atan", "sinh", "cosh", "tanh", "asinh"), (-3, 3)),
        **dict.fromkeys(("erf", "erfc", "sigmoid", "abs", "neg", "frac", "sinc"), (-3, 3)),
        **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal"), (0.1, 9)),
        **dict.fromkeys(("asin", "acos", "atanh", "erfinv"), (-0.9, 0.9)),
        **dict.fromkeys(("floor", "ceil", "round", "trunc"), (-9, 9)),
        "tan": (-1.3, 1.3),
        "acosh": (1.1, 9),
    }
    steps = ("floor", "ceil", "round", "trunc", "abs", "neg")
    cases = []
    for name, (low, high) in domains.items():
        dtypes = FLOATS + INTEGERS if name in ("abs", "neg") else FLOATS
        scale = 1 if name in steps else 4  # The elementary functions of float32 are off by a few units.
        inputs = [tensor(low, high)]
        cases.append(Case(name, getattr(torch, name), inputs, dtypes, out=True, scale=scale))
        cases.append(Case(name + "_", getattr(Tensor, name + "_"), inputs, dtypes, inplace=True, scale=scale))
    for name in ("sign", "signbit", "isfinite", "isinf", "isnan", "logical_not"):
        cases.append(Case(name, getattr(torch, name), [tensor()], NUMBERS))
    for name in ("isposinf", "isneginf"):
        cases.append(Case(name, getattr(torch, name), [tensor()], FLOATS))
    cases += [
        Case("bitwise_not", torch.bitwise_not, [tensor()], (*INTEGERS, torch.bool)),
        Case("nan_to_num", lambda x: torch.nan_to_num(x / x.round(), 5, 6, 7), [tensor(-1.4, 1.4)], FLOATS[:1]),
        Case("round decimals", lambda x: torch.round(x, decimals=1), [tensor()], FLOATS[:1]),
    ]
    return cases


def binary() -> list[Case]:
    cases = []
    for name in ("add", "sub", "mul", "minimum", "maximum"):
        cases.append(Case(name, getattr(torch, name), [tensor(), broadcast()], NUMBERS, out=True))
    for name in ("add_", "sub_", "mul_"):
        cases.append(Case(name, getattr(Tensor, name), [tensor(), broadcast()], NUMBERS, inplace=True))
        cases.append(Case(name + " number", getattr(Tensor, name), [tensor(), const(2)], NUMBERS, inplace=True))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        cases.append(Case(name, getattr(torch, name), [tensor(-2, 2), broadcast(-2, 2)], ALL, out=True))
        cases.append(Case(name + " number", getattr(torch, name), [tensor(-2, 2), const(1)], NUMBERS))
    for name in ("logical_and", "logical_or", "logical_xor"):
        cases.append(Case(name, getattr(torch, name), [tensor(-1, 1), broadcast(-1, 1)], (torch.bool, torch.int32)))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        dtypes = (torch.bool, *INTEGERS)
        cases.append(Case(name, getattr(torch, name), [tensor(0, 99), broadcast(0, 99)], dtypes))
        cases.append(Case(name + " number", getattr(torch, name), [tensor(0, 99), const(5)], INTEGERS))
    cases += [
        Case("add alpha", lambda a, b: torch.add(a, b, alpha=2), [tensor(), broadcast()], NUMBERS),
        Case("sub alpha", lambda a, b: torch.sub(a, b, alpha=3), [tensor(), broadcast()], NUMBERS),
        Case("add number", lambda a: a + 1.5, [tensor()], NUMBERS),
        Case("rsub", lambda a: 1 - a, [tensor()], NUMBERS),
        Case("mul number", lambda a: a * 2.5, [tensor()], NUMBERS),
        Case("div", torch.div, [tensor(), broadcast(0.5, 4)], FLOATS, out=True),
        Case("div integers", torch.div, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        Case("div number", lambda a: a / 3, [tensor()], NUMBERS),
        Case("div_", Tensor.div_, [tensor(), broadcast(0.5, 4)], FLOATS, inplace=True),
        Case(
            "div floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), [tensor(-9, 9), broadcast(1, 4)], INTEGERS
        ),
        Case(
            "div trunc", lambda a, b: torch.div(a, b, rounding_mode="trunc"), [tensor(-9, 9), broadcast(1, 4)], INTEGERS
        ),
        Case("div floor number", lambda a: torch.div(a, 3, rounding_mode="floor"), [tensor(-9, 9)], INTEGERS),
        Case("floor_divide", lambda a: a // 2, [tensor(-9, 9)], NUMBERS),
        Case("remainder", torch.remainder, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        Case("remainder number", lambda a: a % 3, [tensor(-9, 9)], INTEGERS),
        Case("remainder of number", lambda a: torch.remainder(7, a), [tensor(1, 4)], INTEGERS),
        Case("fmod", torch.fmod, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        Case("fmod number", lambda a: torch.fmod(a, 3), [tensor(-9, 9)], INTEGERS),
        Case("pow number", lambda a: a**3, [tensor()], FLOATS[:1] + INTEGERS, scale=4),
        Case("square", torch.square, [tensor()], FLOATS),
        Case("pow", torch.pow, [tensor(0.2, 3), broadcast(-2, 2)], FLOATS, scale=4),
        Case("pow of number", lambda a: torch.pow(2.0, a), [tensor()], FLOATS, scale=4),
        Case("pow_", lambda a: a.pow_(2), [tensor()], FLOATS, inplace=True),
        Case("atan2", torch.atan2, [tensor(), broadcast()], FLOATS, scale=4),
        Case("xlogy", torch.xlogy, [tensor(), broadcast(0.5, 4)], FLOATS[:1], scale=4),
        Case("logaddexp", torch.logaddexp, [tensor(), broadcast()], FLOATS[:1], scale=4),
        Case("gcd", torch.gcd, [tensor(1, 50), broadcast(1, 50)], INTEGERS[:1]),
        Case("shift left", lambda a: a << 2, [tensor(0, 9)], INTEGERS),
        Case("shift right", lambda a: a >> 1, [tensor(0, 99)], INTEGERS),
        Case("lerp", lambda a, b: torch.lerp(a, b, 0.25), [tensor(), tensor()], FLOATS),
        Case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=2), [tensor(), tensor(), broadcast()], FLOATS),
        Case("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=2), [tensor(), tensor(), broadcast(1, 3)], FLOATS),
        Case("isclose", lambda a: torch.isclose(a, a + 1e-7), [tensor()], FLOATS[:1]),
        Case("equal itself", lambda a: torch.tensor(torch.equal(a, a.clone())), [tensor()], FLOATS),
        Case("unequal", lambda a: torch.tensor(torch.equal(a, a + 1)), [tensor()], FLOATS, empty=False),
        Case("isin", lambda a: torch.isin(a, 2), [tensor()], INTEGERS),
        Case("outer", torch.outer, [sized(4), sized(6)], FLOATS),
    ]
    return cases


def activations() -> list[Case]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "relu": functional.relu,
        "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "mish": functional.mish,
        "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
        "elu": lambda x: functional.elu(x, 0.7),
        "celu": lambda x: functional.celu(x, 0.7),
        "hardswish": functional.hardswish,
        "hardsigmoid": functional.hardsigmoid,
        "hardtanh": lambda x: functional.hardtanh(x, -1, 2),
        "softplus": functional.softplus,
        "logsigmoid": functional.logsigmoid,
        "threshold": lambda x: functional.threshold(x, 0.5, 7.0),
        "clamp": lambda x: x.clamp(-1, 2),
        "clamp min": lambda x: x.clamp(min=0),
        "clamp max": lambda x: x.clamp(max=1),
    }
    cases = [Case(name, function, [tensor()], FLOATS, scale=4) for name, function in functions.items()]
    cases += [
        Case("silu_", lambda x: functional.silu(x, inplace=True), [tensor()], FLOATS, inplace=True, scale=4),
        Case("relu_", Tensor.relu_, [tensor()], FLOATS, inplace=True),
        Case("clamp_", lambda x: x.clamp_(-1, 1), [tensor()], NUMBERS, inplace=True),
        Case("clamp tensors", torch.clamp, [tensor(), tensor(-2, 0), tensor(0, 2)], FLOATS),
        Case("glu", lambda x: functional.glu(x, -1), [sized(3, 8)], FLOATS, scale=4),
        Case("npu_gelu", lambda x: gelu(x, "none"), [tensor()], FLOATS, scale=4),
        Case("npu_gelu tanh", lambda x: gelu(x, "tanh"), [tensor()], FLOATS, scale=4),
        Case("dropout off", lambda x: functional.dropout(x, 0.5, training=False) + 0, [tensor()], FLOATS),
    ]
    return cases
