"""The cases of test_aten.py: every ATen operation that the emulated CANN implements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from helpers.emulator.aten_draw import (
    ALL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Case,
    broadcast,
    const,
    dim,
    distinct,
    index,
    mask,
    permutation,
    sized,
    tensor,
)

Inplace, SINGLE = partial(Case, inplace=True), FLOATS[:1]


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
        cases.append(Inplace(name + "_", getattr(Tensor, name + "_"), inputs, dtypes, scale=scale))
    for name in ("sign", "signbit", "isfinite", "isinf", "isnan", "logical_not"):
        cases.append(Case(name, getattr(torch, name), [tensor()], NUMBERS))
    for name in ("isposinf", "isneginf"):
        cases.append(Case(name, getattr(torch, name), [tensor()]))
    cases += [
        Case("bitwise_not", torch.bitwise_not, [tensor()], (*INTEGERS, torch.bool)),
        Case("nan_to_num", lambda x: torch.nan_to_num(x / x.round(), 5, 6, 7), [tensor(-1.4, 1.4)], SINGLE),
        Case("round decimals", lambda x: torch.round(x, decimals=1), [tensor()], SINGLE),
    ]
    return cases


def binary() -> list[Case]:
    cases = []
    for name in ("add", "sub", "mul", "minimum", "maximum"):
        cases.append(Case(name, getattr(torch, name), [tensor(), broadcast()], NUMBERS, out=True))
    for name in ("add_", "sub_", "mul_"):
        cases.append(Inplace(name, getattr(Tensor, name), [tensor(), broadcast()], NUMBERS))
        cases.append(Inplace(name + " number", getattr(Tensor, name), [tensor(), const(2)], NUMBERS))
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
        Case("div", torch.div, [tensor(), broadcast(0.5, 4)], out=True),
        Case("div integers", torch.div, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        Case("div number", lambda a: a / 3, [tensor()], NUMBERS),
        Inplace("div_", Tensor.div_, [tensor(), broadcast(0.5, 4)]),
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
        Case("pow number", lambda a: a**3, [tensor()], SINGLE + INTEGERS, scale=4),
        Case("square", torch.square, [tensor()]),
        Case("pow", torch.pow, [tensor(0.2, 3), broadcast(-2, 2)], scale=4),
        Case("pow of number", lambda a: torch.pow(2.0, a), [tensor()], scale=4),
        Inplace("pow_", lambda a: a.pow_(2), [tensor()]),
        Case("atan2", torch.atan2, [tensor(), broadcast()], scale=4),
        Case("xlogy", torch.xlogy, [tensor(), broadcast(0.5, 4)], SINGLE, scale=4),
        Case("logaddexp", torch.logaddexp, [tensor(), broadcast()], SINGLE, scale=4),
        Case("gcd", torch.gcd, [tensor(1, 50), broadcast(1, 50)], INTEGERS[:1]),
        Case("shift left", lambda a: a << 2, [tensor(0, 9)], INTEGERS),
        Case("shift right", lambda a: a >> 1, [tensor(0, 99)], INTEGERS),
        Case("lerp", lambda a, b: torch.lerp(a, b, 0.25), [tensor(), tensor()]),
        Case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=2), [tensor(), tensor(), broadcast()]),
        Case("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=2), [tensor(), tensor(), broadcast(1, 3)]),
        Case("isclose", lambda a: torch.isclose(a, a + 1e-7), [tensor()], SINGLE),
        Case("equal itself", lambda a: torch.tensor(torch.equal(a, a.clone())), [tensor()]),
        Case("unequal", lambda a: torch.tensor(torch.equal(a, a + 1)), [tensor()], empty=False),
        Case("isin", lambda a: torch.isin(a, 2), [tensor()], INTEGERS),
        Case("outer", torch.outer, [sized(4), sized(6)]),
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
    cases = [Case(name, function, [tensor()], scale=4) for name, function in functions.items()]
    cases += [
        Inplace("silu_", lambda x: functional.silu(x, inplace=True), [tensor()], scale=4),
        Inplace("relu_", Tensor.relu_, [tensor()]),
        Inplace("clamp_", lambda x: x.clamp_(-1, 1), [tensor()], NUMBERS),
        Case("clamp tensors", torch.clamp, [tensor(), tensor(-2, 0), tensor(0, 2)]),
        Case("glu", lambda x: functional.glu(x, -1), [sized(3, 8)], scale=4),
        Case("npu_gelu", lambda x: gelu(x, "none"), [tensor()], scale=4),
        Case("npu_gelu tanh", lambda x: gelu(x, "tanh"), [tensor()], scale=4),
        Case("dropout off", lambda x: functional.dropout(x, 0.5, training=False) + 0, [tensor()]),
    ]
    return cases


def rarer() -> list[Case]:
    """Return cases for rarely used in-place and mixed forms."""
    cases = []
    for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_"):
        cases.append(Inplace(name, getattr(Tensor, name), [tensor(-2, 2), broadcast(-2, 2)], NUMBERS))
        cases.append(Inplace(name + " number", getattr(Tensor, name), [tensor(-2, 2), const(1)], NUMBERS))
    for name in ("logical_and_", "logical_or_"):
        cases.append(Inplace(name, getattr(Tensor, name), [mask, mask], (torch.bool,)))
    for name in ("bitwise_and_", "bitwise_or_", "bitwise_xor_"):
        cases.append(Inplace(name, getattr(Tensor, name), [tensor(0, 99), broadcast(0, 99)], INTEGERS))
        cases.append(Inplace(name + " number", getattr(Tensor, name), [tensor(0, 99), const(6)], INTEGERS))
    for name in ("remainder_", "fmod_", "floor_divide_"):
        cases.append(Inplace(name, getattr(Tensor, name), [tensor(-9, 9), broadcast(1, 4)], INTEGERS))
        cases.append(Inplace(name + " number", getattr(Tensor, name), [tensor(-9, 9), const(4)], INTEGERS))
    for name in ("addcmul_", "addcdiv_"):
        cases.append(Inplace(name, getattr(Tensor, name), [tensor(), tensor(), broadcast(1, 3)]))
    for name, numbers in {"clamp_min_": (0,), "clamp_max_": (1,), "hardtanh_": (-1, 1), "leaky_relu_": (0.1,)}.items():
        function = getattr(functional, name) if hasattr(functional, name) else getattr(Tensor, name)
        cases.append(Inplace(name, function, [tensor(), *map(const, numbers)], scale=4))
    activations = {
        "celu": {},
        "elu": {},
        "hardswish": {},
        "hardsigmoid": {},
        "mish": {},
        "threshold": {"threshold": 0.5, "value": 7},
    }
    for name, options in activations.items():

        def call(x: Tensor, name: str = name, options: Any = options) -> Any:
            return getattr(functional, name)(x, inplace=True, **options)

        cases.append(Inplace(name + "_", call, [tensor()], scale=4))
    volume = sized(2, 3, 4, 5)
    cases += [
        Case("add a number first", lambda x: torch.add(torch.tensor(1.5), x, alpha=2), [tensor()]),
        Case("rsub tensor", torch.rsub, [tensor(), broadcast()]),
        Case("floor_divide tensors", torch.floor_divide, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        Inplace("div_ number", lambda x: x.div_(3), [tensor()]),
        Inplace(
            "div_ floor", lambda x, y: x.div_(y, rounding_mode="floor"), [tensor(-9, 9), broadcast(1, 4)], INTEGERS
        ),
        Inplace("div_ trunc number", lambda x: x.div_(2, rounding_mode="trunc"), [tensor(-9, 9)], INTEGERS),
        Inplace("pow_ tensor", Tensor.pow_, [tensor(0.5, 2), broadcast(-2, 2)], scale=4),
        Inplace("atan2_", Tensor.atan2_, [tensor(), broadcast()], SINGLE, scale=4),
        Case(
            "xlogy numbers",
            lambda x: (torch.xlogy(x, 2.0), torch.xlogy(2.0, x), x.xlogy_(3.0)),
            [tensor(0.5, 3)],
            SINGLE,
            scale=4,
        ),
        Case("logaddexp2", torch.logaddexp2, [tensor(), broadcast()], SINGLE, scale=4),
        Case("shift tensors", lambda x, y: (x << y, x >> y), [tensor(0, 99), broadcast(0, 4)], INTEGERS),
        Case("isin number in tensor", lambda x: torch.isin(2, x), [tensor()], INTEGERS),
        Case("lerp tensors", torch.lerp, [tensor(), tensor(), tensor(0, 1)]),
        Inplace("lerp_", lambda x, y: x.lerp_(y, 0.3), [tensor(), tensor()]),
        Inplace("lerp_ tensors", Tensor.lerp_, [tensor(), tensor(), tensor(0, 1)]),
        Inplace("nan_to_num_", lambda x: x.div_(x.round()).nan_to_num_(5, 6, 7), [tensor(-1.4, 1.4)], SINGLE),
        Inplace("round_ decimals", lambda x: x.round_(decimals=1), [tensor()], SINGLE),
        Case("prelu", functional.prelu, [sized(3, 4), sized(4)]),
        Case("softshrink", functional.softshrink, [tensor()]),
        Case("hardshrink", functional.hardshrink, [tensor()]),
        Case("logit", torch.logit, [tensor(0.1, 0.9)], SINGLE, scale=8),
        Case(
            "clamp_min tensors",
            lambda x, y: (x.clamp_min(y), x.clamp_max(y), x.clamp_min(0), x.clamp_max(0)),
            [tensor(), tensor()],
        ),
        Inplace("clamp_min_ tensors", lambda x, y, z: x.clamp_min_(y).clamp_max_(z), [tensor(), tensor(), tensor()]),
        Case("aminmax", lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=-1)), [tensor()], empty=False),
        Case(
            "nansum",
            lambda x: torch.nansum(x / x.round(), -1),
            [tensor(-1.4, 1.4, torch.float32)],
            SINGLE,
            dims=1,
            scale=8,
        ),
        Case("median all", lambda x: (x.median(), x.nanmedian()), [distinct], SINGLE, empty=False),
        Case("nanmedian", lambda x: torch.nanmedian(x, -1), [distinct], SINGLE, dims=1, empty=False),
        Case("std_mean", lambda x: torch.std_mean(x, -1), [sized(4, 7)], SINGLE, scale=4),
        Case("cummin", torch.cummin, [distinct, dim], SINGLE + INTEGERS[:1]),
        Case("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), [sized(4, 6)], SINGLE, scale=4),
        Inplace("renorm_", lambda x: x.renorm_(1, 1, 1.0), [sized(4, 6)], SINGLE, scale=4),
        Inplace("addmm_", Tensor.addmm_, [sized(4, 5), sized(4, 8), sized(8, 5)]),
        Case("addmv", torch.addmv, [sized(4), sized(4, 8), sized(8)]),
        Case("addr", torch.addr, [sized(4, 5), sized(4), sized(5)]),
        Inplace("addr_", Tensor.addr_, [sized(4, 5), sized(4), sized(5)], SINGLE),
        Case(
            "cholesky",
            lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4, device=x.device, dtype=x.dtype)),
            [sized(2, 4, 4)],
            SINGLE,
            scale=8,
        ),
        Case("cross", lambda x, y: torch.linalg.cross(x, y), [sized(5, 3), sized(5, 3)], SINGLE),
        Case("angle", torch.angle, [tensor()], SINGLE),
        Case("index_copy", lambda x, i, v: x.index_copy(0, i, v), [sized(6, 8), permutation(6), sized(6, 8)], NUMBERS),
        Case("index_fill", lambda x, i: x.index_fill(0, i, 2), [sized(6, 8), index(3, end=6)]),
        Inplace("put_", lambda x, i, v: x.put_(i, v), [sized(6, 8), permutation(8), sized(8)]),
        Inplace(
            "scatter_reduce_",
            lambda x, i, v: x.scatter_reduce_(1, i, v, "prod"),
            [sized(6, 8), index(6, 3, end=8), sized(6, 3)],
            SINGLE,
        ),
        Case("searchsorted number", lambda s: torch.searchsorted(s.sort()[0], 0.1), [sized(9)], SINGLE),
        Case(
            "unique rows",
            lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
            [sized(9, 2)],
            INTEGERS,
        ),
        Case("repeat_interleave each", lambda x, n: x.repeat_interleave(n), [sized(6), index(6, end=4)], NUMBERS),
        Inplace("triu_ tril_", lambda x: x.triu_(-1).tril_(1), [sized(5, 4)], NUMBERS),
        Case("channel_shuffle", lambda x: functional.channel_shuffle(x, 2), [sized(2, 4, 3, 3)], SINGLE),
        Case("unfold", lambda x: functional.unfold(x, 2, stride=2), [volume], FLOATS[:2]),
        Case("pad reflect 2d", lambda x: functional.pad(x, (1, 2, 2, 1), mode="reflect"), [volume], FLOATS[:2]),
        Case(
            "pad replicate",
            lambda x: (
                functional.pad(x, (1, 2, 2, 1), mode="replicate"),
                functional.pad(x[0], (3, 0), mode="replicate"),
            ),
            [volume],
            FLOATS[:2],
        ),
        Case(
            "pad 3d",
            lambda x: (
                functional.pad(x[None], (1,) * 6, mode="reflect"),
                functional.pad(x[None], (1,) * 6, mode="replicate"),
            ),
            [volume],
            SINGLE,
        ),
        Case(
            "logspace range",
            lambda x: (torch.logspace(0, 2, 5, device=x.device), torch.range(1, 4, device=x.device)),
            [sized()],
            SINGLE,
            scale=4,
        ),
        Case(
            "batch_norm",
            lambda x, m, v: functional.batch_norm(x, m, v),
            [sized(6, 4), sized(4), sized(4, low=0.5)],
            SINGLE,
            scale=8,
        ),
        Case(
            "batch_norm training",
            lambda x: functional.batch_norm(x, None, None, training=True),
            [sized(6, 4)],
            SINGLE,
            scale=8,
        ),
        Case(
            "int8",
            lambda x: (x + 1, x * 2, -x, x.abs(), x > 1, x.to(torch.float16), x.sum(), x[:1]),
            [sized(5, 3, low=0, high=9)],
            (torch.int8, torch.int16, torch.uint8),
        ),
        Case("cast to int8", lambda x: (x.to(torch.int8), x.abs().to(torch.uint8), x.to(torch.int16)), [tensor(-9, 9)]),
    ]
    return cases


def reductions() -> list[Case]:
    cases = []
    for keep in (False, True):
        suffix = " keepdim" if keep else ""

        def along(name: str, keep: bool = keep) -> Callable[..., Any]:
            return lambda x, d: getattr(torch, name)(x, d, keepdim=keep)

        cases += [Case(name + suffix, along(name), [tensor(), dim]) for name in ("sum", "mean")]
        cases += [Case(name + suffix, along(name), [tensor(), dim], NUMBERS, empty=False) for name in ("amax", "amin")]
        cases += [Case(name + suffix, along(name), [distinct, dim], NUMBERS, empty=False) for name in ("max", "min")]
        cases += [
            Case(name + suffix, along(name), [distinct, dim], NUMBERS, empty=False) for name in ("argmax", "argmin")
        ]
        cases += [Case(name + suffix, along(name), [mask, dim], (torch.bool,)) for name in ("any", "all")]
        cases += [Case("logsumexp" + suffix, along("logsumexp"), [tensor(), dim], empty=False, scale=4)]
    cases += [
        Case("sum all", torch.sum, [tensor()], NUMBERS),
        Case("sum bool", torch.sum, [mask], (torch.bool,)),
        Case("sum two", lambda x: x.sum((0, -1)), [tensor()], dims=2),
        Case("sum dtype", lambda x: x.sum(-1, dtype=torch.float32), [tensor()], dims=1),
        Case("mean all", torch.mean, [tensor()], empty=False),
        Case("prod", lambda x: x.prod(-1), [tensor(0.5, 1.5)], dims=1, scale=4),
        Case("prod all", torch.prod, [tensor(0.5, 1.5)], scale=4),
        Case("max all", torch.max, [tensor()], NUMBERS, empty=False),
        Case("min all", torch.min, [tensor()], NUMBERS, empty=False),
        Case("argmax all", torch.argmax, [distinct], NUMBERS, empty=False),
        Case("any all", torch.any, [mask], (torch.bool,)),
        Case("all all", torch.all, [mask], (torch.bool,)),
        Case("var", lambda x: x.var(-1), [sized(4, 7)], scale=4),
        Case("var uncorrected", lambda x: x.var(0, correction=0), [sized(4, 7)], scale=4),
        Case("var_mean", lambda x: torch.var_mean(x, -1), [sized(4, 7)], scale=4),
        Case("std", lambda x: x.std(-1), [sized(4, 7)], scale=4),
        Case("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), [sized(4, 7)], scale=4),
        Case("norm 1", lambda x: torch.linalg.vector_norm(x, 1), [sized(4, 7)], scale=4),
        Case("median", lambda x: torch.median(x, -1), [distinct], SINGLE + INTEGERS[:1], dims=1, empty=False),
        Case("kthvalue", lambda x: torch.kthvalue(x, 2, -1), [sized(3, 7)], SINGLE),
        Case("count_nonzero", torch.count_nonzero, [tensor(-1, 1)], NUMBERS),
        Case("cumsum", torch.cumsum, [tensor(), dim], NUMBERS, scale=4),
        Case("cumprod", torch.cumprod, [tensor(0.5, 1.5), dim], SINGLE, scale=4),
        Case("cummax", torch.cummax, [distinct, dim], SINGLE + INTEGERS[:1]),
        Case("bincount", torch.bincount, [index(9, end=5)], (torch.int64,)),
        Case("histc", lambda x: torch.histc(x, 8, -3, 3), [sized(40, low=-3, high=3)], SINGLE),
        Case("trace", torch.trace, [sized(5, 5)], SINGLE),
        Case("diff", lambda x: torch.diff(x, dim=-1), [sized(3, 6)]),
    ]
    return cases


def products() -> list[Case]:
    return [
        Case("mm", torch.mm, [sized(4, 8), sized(8, 5)], out=True),
        Case("mm nothing", torch.mm, [sized(4, 0), sized(0, 5)]),
        Case("mv", torch.mv, [sized(4, 8), sized(8)]),
        Case("dot", torch.dot, [sized(8), sized(8)]),
        Case("bmm", torch.bmm, [sized(3, 4, 8), sized(3, 8, 5)], out=True),
        Case("matmul 3d2d", torch.matmul, [sized(2, 4, 8), sized(8, 5)]),
        Case("matmul 4d", torch.matmul, [sized(2, 3, 4, 8), sized(2, 3, 8, 5)]),
        Case("matmul broadcast", torch.matmul, [sized(2, 1, 4, 8), sized(3, 8, 5)]),
        Case("matmul 1d", torch.matmul, [sized(4, 8), sized(8)]),
        Case("addmm", torch.addmm, [sized(5), sized(4, 8), sized(8, 5)]),
        Case(
            "addmm scaled",
            lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=3),
            [sized(4, 5), sized(4, 8), sized(8, 5)],
        ),
        Case("baddbmm", torch.baddbmm, [sized(3, 4, 5), sized(3, 4, 8), sized(3, 8, 5)]),
        Case("addbmm", torch.addbmm, [sized(4, 5), sized(3, 4, 8), sized(3, 8, 5)]),
        Case("linear", functional.linear, [sized(4, 8), sized(5, 8)]),
        Case("linear bias", functional.linear, [sized(4, 8), sized(5, 8), sized(5)]),
        Case(
            "linear bias 3d", functional.linear, [sized(2, 4, 8), sized(5, 8), sized(5)], SINGLE
        ),  # two kernels round twice
        Case("einsum", lambda a, b: torch.einsum("bij,bjk->bik", a, b), [sized(3, 4, 8), sized(3, 8, 5)]),
        Case(
            "einsum transposed",
            lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
            [sized(2, 3, 4, 8), sized(2, 3, 5, 8)],
        ),
    ]


def norms() -> list[Case]:
    return [
        Case("softmax", lambda x: x.softmax(-1), [tensor()], scale=4),
        Case("softmax first", lambda x: x.softmax(0), [tensor()], dims=1, scale=4),
        Case("softmax dtype", lambda x: x.softmax(-1, dtype=torch.float32), [tensor()], dims=1, scale=4),
        Case("log_softmax", lambda x: x.log_softmax(-1), [tensor()], dims=1, scale=4),
        Case(
            "layer_norm",
            lambda x, w, b: functional.layer_norm(x, (8,), w, b),
            [sized(3, 5, 8), sized(8), sized(8)],
            scale=8,
        ),
        Case("layer_norm plain", lambda x: functional.layer_norm(x, (5, 8)), [sized(3, 5, 8)], scale=8),
        Case(
            "group_norm",
            lambda x, w, b: functional.group_norm(x, 2, w, b),
            [sized(3, 4, 5), sized(4), sized(4)],
            SINGLE,
            scale=8,
        ),
        Case(
            "rms_norm",
            lambda x, w: functional.rms_norm(x, (8,), w, 1e-6),
            [sized(3, 8, low=0.5), sized(8)],
            SINGLE,
            scale=8,
        ),
    ]


def losses() -> list[Case]:
    same, target = sized(6, 5), index(6, end=5)
    return [
        Case("cross_entropy", functional.cross_entropy, [same, target], SINGLE, scale=4),
        Case(
            "cross_entropy ignore",
            lambda x, t: functional.cross_entropy(x, t, ignore_index=2),
            [same, target],
            SINGLE,
            scale=4,
        ),
        Case("nll_loss", lambda x, t: functional.nll_loss(x, t, reduction="none"), [same, target]),
        Case("mse_loss", functional.mse_loss, [same, same]),
        Case("mse_loss none", lambda x, y: functional.mse_loss(x, y, reduction="none"), [tensor(), tensor()], SINGLE),
        Case("l1_loss", lambda x, y: functional.l1_loss(x, y, reduction="sum"), [same, same]),
        Case("smooth_l1_loss", functional.smooth_l1_loss, [same, same], SINGLE, scale=4),
        Case(
            "kl_div", lambda x, y: functional.kl_div(x, y.exp(), reduction="batchmean"), [same, same], SINGLE, scale=4
        ),
        Case(
            "bce_with_logits", functional.binary_cross_entropy_with_logits, [same, sized(6, 5, low=0)], SINGLE, scale=4
        ),
        Case("conv1d", functional.conv1d, [sized(2, 4, 9), sized(6, 4, 3), sized(6)]),
        Case(
            "conv1d depthwise",
            lambda x, w: functional.conv1d(x, w, padding=2, groups=4),
            [sized(2, 4, 9), sized(4, 1, 3)],
        ),
        Case(
            "conv2d", lambda x, w: functional.conv2d(x, w, stride=2, padding=1), [sized(2, 3, 8, 9), sized(5, 3, 3, 2)]
        ),
        Case("conv2d patches", lambda x, w: functional.conv2d(x, w, stride=4), [sized(1, 3, 8, 12), sized(5, 3, 4, 4)]),
        Case(
            "inverse",
            lambda x: torch.inverse(x + 4 * torch.eye(4, device=x.device, dtype=x.dtype)),
            [sized(2, 4, 4)],
            SINGLE,
            scale=8,
        ),
        Case("cdist", torch.cdist, [sized(5, 3), sized(4, 3)], SINGLE, scale=4),
        Case(
            "complex",
            lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.polar(x.abs(), y)),
            [same, same],
            SINGLE,
            scale=4,
        ),
    ]


def indexing() -> list[Case]:
    rows = sized(6, 8)
    return [
        Case("embedding", lambda w, i: functional.embedding(i, w), [sized(9, 8), index(2, 5, end=9)]),
        Case("index_select", lambda x, i: x.index_select(1, i), [rows, index(5, end=8)], NUMBERS),
        Case("gather", lambda x, i: x.gather(1, i), [rows, index(6, 3, end=8)], NUMBERS),
        Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), [rows, index(6, 3, end=8)]),
        Case("take", torch.take, [rows, index(5, end=48)]),
        Case("index", lambda x, i: x[i], [rows, index(4, end=6)], NUMBERS),
        Case("index two", lambda x, i, j: x[i, j], [rows, index(4, end=6), index(4, end=8)]),
        Case("index broadcast", lambda x, i, j: x[i, j], [rows, index(4, 1, end=6), index(3, end=8)]),
        Case("index second", lambda x, i: x[:, i], [sized(3, 6, 8), index(4, end=6)]),
        Case("index nothing", lambda x, i: x[i], [rows, index(0, end=6)]),
        Case("index mask", lambda x: x[x > 0], [tensor()], dims=1),
        Case("index rows by mask", lambda x: x[x[:, 0] > 0], [rows]),
        Case("masked_select", lambda x, m: torch.masked_select(x, m), [tensor(), mask], NUMBERS),
        Case("nonzero", lambda x: x.nonzero(), [tensor(-1, 1)], (*INTEGERS, torch.bool)),
        Case("where one", lambda x: torch.where(x > 0)[0], [tensor()], dims=1),
        Case("index_put", lambda x, i, v: x.index_put((i,), v), [rows, permutation(6), sized(6, 8)], NUMBERS),
        Inplace(
            "index_put_ add",
            lambda x, i, v: x.index_put_((i,), v, accumulate=True),
            [rows, index(9, end=6), sized(9, 8)],
            SINGLE + INTEGERS,
        ),
        Inplace("index assign number", lambda x, i: x.__setitem__(i, 2), [rows, index(3, end=6)]),
        Inplace("index assign nothing", lambda x, i: x.__setitem__(i, 2), [rows, index(0, end=6)]),
        Inplace("mask assign", lambda x: x.__setitem__(x > 0, 7), [tensor()], dims=1),
        Inplace("mask assign rows", lambda x, v: x.__setitem__(x[:, 0] > 2, v), [rows, sized(1, 8)]),
        Inplace("index_copy_", lambda x, i, v: x.index_copy_(0, i, v), [rows, permutation(6), sized(6, 8)], NUMBERS),
        Inplace("index_fill_", lambda x, i: x.index_fill_(0, i, 2), [rows, index(3, end=6)]),
        Inplace(
            "index_add_",
            lambda x, i, v: x.index_add_(0, i, v, alpha=2),
            [rows, index(9, end=6), sized(9, 8)],
            SINGLE + INTEGERS,
        ),
        Inplace(
            "scatter_",
            lambda x, i, v: x.scatter_(0, i.unsqueeze(1).expand(6, 8), v),
            [rows, permutation(6), sized(6, 8)],
            NUMBERS,
        ),
        Inplace("scatter_ number", lambda x, i: x.scatter_(1, i, 2), [rows, index(6, 3, end=8)], NUMBERS),
        Case("scatter", lambda x, i: x.scatter(1, i, 2), [rows, index(6, 3, end=8)]),
        Inplace(
            "scatter_add_",
            lambda x, i, v: x.scatter_add_(1, i, v),
            [rows, index(6, 3, end=8), sized(6, 3)],
            FLOATS + INTEGERS,
        ),
        Case(
            "scatter_reduce amax",
            lambda x, i, v: x.scatter_reduce(1, i, v, "amax"),
            [rows, index(6, 3, end=8), sized(6, 3)],
            SINGLE,
        ),
        Case("masked_fill", lambda x, m: x.masked_fill(m, -2), [tensor(), mask], NUMBERS),
        Inplace(
            "masked_fill_ tensor",
            lambda x, m: x.masked_fill_(m, torch.full((), 2.0, device=x.device)),
            [tensor(), mask],
        ),
        Inplace("masked_scatter_", lambda x, m, v: x.masked_scatter_(m, v), [tensor(), mask, tensor()]),
        Case("where", torch.where, [mask, tensor(), broadcast()], NUMBERS),
        Case("where number", lambda m, x: torch.where(m, x, 2.0), [mask, tensor()]),
        Case("one_hot", lambda i: functional.one_hot(i, 7), [index(3, 4, end=7)], (torch.int64,)),
        Case("searchsorted", lambda s, x: torch.searchsorted(s.sort()[0], x), [sized(9), sized(3, 4)], SINGLE),
        Case("bucketize", lambda x, b: torch.bucketize(x, b.sort()[0], right=True), [sized(3, 4), sized(9)], SINGLE),
        Case("sort", lambda x, d: torch.sort(x, d), [distinct, dim], NUMBERS),
        Case("sort descending", lambda x, d: torch.sort(x, d, descending=True), [distinct, dim], NUMBERS),
        Case("argsort", lambda x: torch.argsort(x, -1), [distinct], NUMBERS),
        Case("topk", lambda x: torch.topk(x, min(3, x.shape[-1])), [distinct], NUMBERS, dims=1, empty=False),
        Case("topk smallest", lambda x: torch.topk(x, 1, 0, largest=False), [distinct], NUMBERS, dims=1, empty=False),
        Case("unique", lambda x: torch.unique(x), [tensor(-2, 2)], INTEGERS),
        Case(
            "unique all", lambda x: torch.unique(x, return_inverse=True, return_counts=True), [tensor(-2, 2)], INTEGERS
        ),
        Case("unique_consecutive", lambda x: torch.unique_consecutive(x), [tensor(-1, 1)], INTEGERS, dims=1),
    ]


def shapes() -> list[Case]:
    return [
        Case("cat", lambda a, b: torch.cat((a, b), -1), [sized(3, 4), sized(3, 5)], ALL),
        Case("cat first", lambda a, b: torch.cat((a, b, a)), [sized(3, 4), sized(2, 4)], ALL),
        Case("cat nothing", lambda a, b: torch.cat((a, b)), [sized(0), sized(3, 4)], NUMBERS),
        Case("stack", lambda a, b: torch.stack((a, b), 1), [tensor(), tensor()], NUMBERS, dims=1),
        Case("split", lambda x: [each + 0 for each in x.split((2, 3), 0)], [sized(5, 4)], NUMBERS),
        Case("chunk", lambda x: [each * 1 for each in x.chunk(3, -1)], [sized(2, 7)], NUMBERS),
        Case("repeat", lambda x: x.repeat(2, 3, 1), [sized(3, 4)], ALL),
        Case("tile", lambda x: x.tile(2), [tensor()], NUMBERS, dims=1),
        Case("repeat_interleave", lambda x: x.repeat_interleave(3, 0), [sized(3, 4)], NUMBERS),
        Case("repeat_interleave flat", lambda x: x.repeat_interleave(2), [sized(3, 4)], NUMBERS),
        Case(
            "repeat_interleave tensor", lambda x, n: x.repeat_interleave(n, 0), [sized(5, 4), index(5, end=4)], NUMBERS
        ),
        Case("expand", lambda x: x.expand(3, 4, 5).contiguous(), [sized(4, 1)], ALL),
        Case("permute", lambda x: x.permute(2, 0, 1).contiguous(), [sized(2, 3, 4)], ALL),
        Case("transpose", lambda x: x.transpose(0, -1).contiguous(), [tensor()], ALL, dims=2),
        Case("reshape", lambda x: x.transpose(0, 1).reshape(-1), [sized(3, 4)], ALL),
        Case("flip", lambda x: x.flip(0, -1), [tensor()], NUMBERS, dims=2),
        Case("roll", lambda x: x.roll((1, -2), (0, 1)), [sized(4, 5)], NUMBERS),
        Case("roll flat", lambda x: x.roll(3), [sized(4, 5)], NUMBERS),
        Case("pad", lambda x: functional.pad(x, (1, 2, 0, 1), value=3), [sized(3, 4)], NUMBERS),
        Case("pad negative", lambda x: functional.pad(x, (-1, 2)), [sized(3, 4)], NUMBERS),
        Case("pad reflect", lambda x: functional.pad(x, (1, 2), mode="reflect"), [sized(2, 3, 4)], FLOATS[:2]),
        Case("triu", lambda x: x.triu(1), [sized(5, 4)], NUMBERS, out=False),
        Case("tril", lambda x: x.tril(-1), [sized(2, 5, 4)], NUMBERS),
        Case("triu mask", lambda x: torch.ones(x.shape[-1], 6, device=x.device, dtype=torch.bool).triu(1), [sized(4)]),
        Inplace("copy_", lambda x, y: x.copy_(y), [tensor(), broadcast()], ALL),
        Inplace("copy_ cast", lambda x, y: x.copy_(y), [tensor(), tensor(dtype=torch.float32)], NUMBERS),
        Case("to float32", lambda x: x.to(torch.float32), [tensor()], ALL),
        Case("to bfloat16", lambda x: x.to(torch.bfloat16), [tensor()], (torch.float32, torch.float16)),
        Case("to int32", lambda x: x.to(torch.int32), [tensor()]),
        Case("to bool", lambda x: x.bool(), [tensor(-1, 1)], INTEGERS),
        Case("clone", lambda x: x.clone(), [tensor()], ALL),
        Inplace("zero_", Tensor.zero_, [tensor()], ALL),
        Inplace("fill_", lambda x: x.fill_(2), [tensor()], NUMBERS),
        Inplace("fill_ tensor", lambda x, v: x.fill_(v), [tensor(), sized()], NUMBERS),
        Inplace("fill_diagonal_", lambda x: x.fill_diagonal_(5), [sized(4, 6)]),
        Case(
            "zeros ones full",
            lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 3)),
            [tensor()],
            NUMBERS,
        ),
        Case("arange", lambda x: torch.arange(2, 20, 3, device=x.device, dtype=x.dtype), [sized()], NUMBERS),
        Case("arange float", lambda x: torch.arange(0, 1, 0.125, device=x.device, dtype=x.dtype), [sized()]),
        Case("linspace", lambda x: torch.linspace(-1, 1, 9, device=x.device, dtype=x.dtype), [sized()]),
        Case("eye", lambda x: torch.eye(3, 5, device=x.device, dtype=x.dtype), [sized()], FLOATS[:2]),
    ]


FAMILIES = (unary, binary, activations, rarer, reductions, products, norms, losses, indexing, shapes)
CASES = [case for family in FAMILIES for case in family()]
