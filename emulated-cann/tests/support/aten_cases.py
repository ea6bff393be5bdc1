"""The cases of test_aten.py: every ATen operation that the emulated CANN implements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from support.aten_draw import (
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

_NAMES = """
abs acos acosh addbmm addcdiv addcmul addmm addmv addr all amax amin aminmax angle any arange argmax argmin asin asinh
atan atan2 atanh baddbmm bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor bmm bucketize cat cdist ceil chunk clamp clamp_max clamp_min clone complex constant_pad_nd cos cosh
count_nonzero cummax cummin cumprod cumsum deg2rad dot eq equal erf erfc erfinv exp exp2 expand expm1 eye fill flip
floor floor_divide fmod frac gcd ge gt histc index_add index_copy index_fill index_put index_select isclose isfinite
isin isinf isnan isneginf isposinf kthvalue ldexp le lerp linalg.cholesky linalg.cross linspace.tensor_overload log
log10 log1p log2 log_softmax log_softmax.with_dtype logaddexp logaddexp2 logical_and logical_not logical_or
logical_xor logit logspace logsumexp lt masked_fill masked_scatter masked_select matmul max.reduction_no_dim
max.reduction_with_dim maximum mean median min.reduction_no_dim min.reduction_with_dim minimum mm msort mul mv
nan_to_num nanmedian nansum ne neg nn.functional.batch_norm nn.functional.binary_cross_entropy
nn.functional.binary_cross_entropy_with_logits nn.functional.celu nn.functional.channel_shuffle nn.functional.conv1d
nn.functional.conv2d nn.functional.elu nn.functional.gaussian_nll_loss nn.functional.glu nn.functional.group_norm
nn.functional.hardshrink nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh nn.functional.kl_div
nn.functional.l1_loss nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid
nn.functional.mish nn.functional.mse_loss nn.functional.one_hot nn.functional.pad.reflect nn.functional.pad.replicate
nn.functional.pairwise_distance nn.functional.prelu nn.functional.relu nn.functional.rms_norm nn.functional.silu
nn.functional.smooth_l1_loss nn.functional.softplus nn.functional.softshrink nn.functional.threshold
nn.functional.unfold nonzero norm ones_like outer permute polar prod put reciprocal remainder renorm repeat
repeat_interleave reshape roll round rsqrt rsub scatter_add searchsorted sigmoid sign signbit sin sinc sinh softmax
softmax.with_dtype split sqrt square stack std.unbiased std_mean.unbiased sum take take_along_dim tan tanh tile trace
transpose trapz tril triu true_divide trunc unfold unique unique_consecutive var.unbiased var_mean.unbiased where
xlogy zeros
"""
OPERATIONS = _NAMES.split()
"""Operations of which torch has samples."""
SCALES = {"addbmm": 20}
"""Factors on the usual tolerance of operations."""
FLOATING = {"exp", "logit", "addbmm", "addmm", "addmv", "baddbmm", "bmm", "matmul", "mm", "mv"}
FLOATING |= {"nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.linear"}
"""Those which take no integers on NPUs, or return integers of them."""


def with_numbers() -> list[Case]:
    """Return cases whose second argument is a number, also of those that mutate the first."""
    numbers: dict[str, Any] = {
        **dict.fromkeys(("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"), (tensor(-2, 2), 1, NUMBERS)),
        **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), (tensor(0, 99), 5, INTEGERS)),
        **dict.fromkeys(("fmod", "remainder"), (tensor(-9, 9), 3, INTEGERS)),
        "floor_divide": (tensor(-9, 9), 2, NUMBERS),
        "div": (tensor(), 3, FLOATS),
        "pow": (tensor(), 2, SINGLE + INTEGERS),
        "xlogy": (tensor(0.5, 3), 3.0, SINGLE),
        "clamp_min": (tensor(), 0, FLOATS),
        "clamp_max": (tensor(), 1, FLOATS),
    }
    cases = []
    for name, (first, number, dtypes) in numbers.items():
        cases.append(Case(f"{name} number", getattr(torch, name), [first, const(number)], dtypes, scale=4))
        cases.append(Inplace(f"{name}_ number", getattr(Tensor, f"{name}_"), [first, const(number)], dtypes, scale=4))
    return [
        *cases,
        Case("add number", lambda a: a + 1.5, [tensor()], NUMBERS),
        Case("mul number", lambda a: a * 2.5, [tensor()], NUMBERS),
        Case("rsub number", lambda a: 1 - a, [tensor()], NUMBERS),
        Case("add to a number", lambda x: torch.add(torch.tensor(1.5), x, alpha=2), [tensor()]),
        Case("div integers by a number", lambda a: a / 3, [tensor()], INTEGERS),
        Case("div floor number", lambda a: torch.div(a, 3, rounding_mode="floor"), [tensor(-9, 9)], INTEGERS),
        Inplace("div_ trunc number", lambda x: x.div_(2, rounding_mode="trunc"), [tensor(-9, 9)], INTEGERS),
        Case("remainder of number", lambda a: torch.remainder(7, a), [tensor(1, 4)], INTEGERS),
        Case("pow of number", lambda a: torch.pow(2.0, a), [tensor()], scale=4),
        Case("xlogy of number", lambda x: torch.xlogy(2.0, x), [tensor(0.5, 3)], SINGLE, scale=4),
        Case("shifts by a number", lambda a: (a << 2, a >> 1), [tensor(0, 99)], INTEGERS),
        Case("isin number", lambda a: (torch.isin(a, 2), torch.isin(2, a)), [tensor()], INTEGERS),
        Case("searchsorted number", lambda s: torch.searchsorted(s.sort()[0], 0.1), [sized(9)], SINGLE),
    ]


def pointwise() -> list[Case]:
    def gelu(x: Tensor, approximate: str) -> Tensor:
        """Call torch_npu's gelu, which has both forms; ATen's is always the tanh form on the NPU."""
        if x.device.type == "npu":
            return torch_npu.npu_gelu(x, approximate=approximate)
        return functional.gelu(x, approximate=approximate)

    def mutating(name: str, *arguments: Any, **options: Any) -> Case:
        function = getattr(functional, name)
        return Inplace(f"{name}_", lambda x: function(x, *arguments, inplace=True, **options), [tensor()], scale=4)

    small = (torch.int8, torch.int16, torch.uint8)
    return [
        *(mutating(name) for name in ("relu", "hardswish", "silu", "mish", "celu", "hardsigmoid")),
        mutating("hardtanh", -1, 2),
        mutating("leaky_relu", 0.1),
        Case("gelu tanh", lambda x: functional.gelu(x, approximate="tanh"), [tensor()], scale=4),
        *(Case(f"npu_gelu {form}", partial(gelu, approximate=form), [tensor()], scale=4) for form in ("none", "tanh")),
        *(Case(f"{each.__name__}", each, [tensor(), broadcast()], NUMBERS) for each in (torch.add, torch.sub)),
        *(Inplace(f"{each.__name__}", each, [tensor(), broadcast()], NUMBERS) for each in (Tensor.add_, Tensor.sub_)),
        Case("add alpha", partial(torch.add, alpha=2), [tensor(), broadcast()], NUMBERS),
        Case("sub alpha", partial(torch.sub, alpha=3), [tensor(), broadcast()], NUMBERS),
        Case("div", torch.div, [tensor(), broadcast(0.5, 4)]),
        Inplace("div_", Tensor.div_, [tensor(), broadcast(0.5, 4)]),
        Case("div integers", torch.div, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        *(
            make(
                f"div {mode}", partial(torch.div if make is Case else Tensor.div_, rounding_mode=mode), given, INTEGERS
            )
            for given in ([tensor(-9, 9), broadcast(1, 4)],)
            for mode in ("floor", "trunc")
            for make in (Case, Inplace)
        ),
        Case("pow", torch.pow, [tensor(0.2, 3), broadcast(-2, 2)], scale=4),
        Inplace("pow_", Tensor.pow_, [tensor(0.5, 2), broadcast(-2, 2)], scale=4),
        Case("shift tensors", lambda x, y: (x << y, x >> y), [tensor(0, 99), broadcast(0, 4)], INTEGERS),
        Case("clamp_max tensors", lambda x, y: (x.clamp_min(y), x.clamp_max(y)), [tensor(), tensor()]),
        Inplace("clamp_max_ tensors", lambda x, y, z: x.clamp_min_(y).clamp_max_(z), [tensor(), tensor(), tensor()]),
        Inplace("clamp_", lambda x: x.clamp_(-1, 1), [tensor()], NUMBERS),
        Inplace("nan_to_num_", lambda x: x.div_(x.round()).nan_to_num_(5, 6, 7), [tensor(-1.4, 1.4)], SINGLE),
        Case("round decimals", lambda x: torch.round(x, decimals=1), [tensor()], SINGLE),
        Inplace("lerp_ tensors", Tensor.lerp_, [tensor(), tensor(), tensor(0, 1)]),
        Inplace("round_ decimals", lambda x: x.round_(decimals=1), [tensor()], SINGLE),
        Inplace("fill_diagonal_", lambda x: x.fill_diagonal_(5), [sized(4, 6)]),
        Inplace("fill_ tensor", lambda x, v: x.fill_(v), [tensor(), sized()], NUMBERS),
        Inplace("zero_", Tensor.zero_, [tensor()], ALL),
        Inplace("copy_", lambda x, y: x.copy_(y), [tensor(), broadcast()], ALL),
        Inplace("copy_ cast", lambda x, y: x.copy_(y), [tensor(), tensor(dtype=torch.float32)], NUMBERS),
        *(
            Case(f"to {dtype}", partial(Tensor.to, dtype=dtype), [tensor(-1, 1)], ALL)
            for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool)
        ),
        Case("to int8", lambda x: (x.to(torch.int8), x.abs().to(torch.uint8), x.to(torch.int16)), [tensor(-9, 9)]),
        Case(
            "small integers",
            lambda x: (x + 1, x * 2, -x, x.abs(), x > 1, x.to(torch.float16), x.sum(), x[:1]),
            [sized(5, 3, low=0, high=9)],
            small,
        ),
        Case(
            "complex",
            lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.polar(x.abs(), y)),
            [sized(6, 5), sized(6, 5)],
            SINGLE,
            scale=4,
        ),
        Case("range", lambda x: torch.range(1, 4, device=x.device), [sized()], SINGLE, scale=4),
        Case("arange", lambda x: torch.arange(2, 20, 3, device=x.device, dtype=x.dtype), [sized()], NUMBERS),
        Case("linspace", lambda x: torch.linspace(-1, 1, 9, device=x.device, dtype=x.dtype), [sized()]),
    ]


def reductions_and_products() -> list[Case]:
    def along(name: str, keep: bool) -> Callable[..., Any]:
        return lambda x, d: getattr(torch, name)(x, d, keepdim=keep)

    square, target, classes = sized(2, 4, 4), index(6, end=5), sized(6, 5)
    return [
        *(
            Case(f"{name} keepdim={keep}", along(name, keep), [distinct, dim], NUMBERS, empty=False)
            for name in ("max", "min")
            for keep in (False, True)
        ),
        *(Case(f"{name} all", getattr(torch, name), [tensor()], NUMBERS, empty=False) for name in ("max", "min")),
        *(Case(name, getattr(torch, name), [sized(4, 7), const(-1)], scale=4) for name in ("var", "std", "var_mean")),
        Case(
            "variance correction",
            lambda x: (x.var(1, correction=2), *torch.std_mean(x, 1, correction=3)),
            [sized(4, 7)],
            scale=4,
        ),
        Case("sum two", lambda x: x.sum((0, -1)), [tensor()], dims=2),
        Case("sum dtype", lambda x: x.sum(-1, dtype=torch.float32), [tensor()], dims=1),
        Case("diff", lambda x: torch.diff(x, dim=-1), [sized(3, 6)]),
        Case("mm nothing", torch.mm, [sized(4, 0), sized(0, 5)]),
        Case("einsum", lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), [sized(2, 3, 4, 8), sized(2, 3, 5, 8)]),
        Case("inverse", lambda x: torch.inverse(x + 4 * torch.eye(4).to(x)), [square], SINGLE, scale=8),
        Case("conv2d patches", lambda x, w: functional.conv2d(x, w, stride=4), [sized(1, 3, 8, 12), sized(5, 3, 4, 4)]),
        Case("cross_entropy", partial(functional.cross_entropy, ignore_index=2), [classes, target], SINGLE, scale=4),
        Case("nll_loss", partial(functional.nll_loss, reduction="none"), [classes, target]),
    ]


def indexing() -> list[Case]:
    rows, few = sized(6, 8), index(6, 3, end=8)

    def assigned(x: Tensor, i: Any, value: Any) -> None:
        x[i] = value

    return [
        Case("embedding", lambda w, i: functional.embedding(i, w), [sized(9, 8), index(2, 5, end=9)]),
        Case("gather", lambda x, i: x.gather(1, i), [rows, few], NUMBERS),
        Case("index", lambda x, i: x[i], [rows, index(4, end=6)], NUMBERS),
        Case("index two", lambda x, i, j: x[i, j], [rows, index(4, end=6), index(4, end=8)]),
        Case("index broadcast", lambda x, i, j: x[i, j], [rows, index(4, 1, end=6), index(3, end=8)]),
        Case("index second", lambda x, i: x[:, i], [sized(3, 6, 8), index(4, end=6)]),
        Case("index nothing", lambda x, i: x[i], [rows, index(0, end=6)]),
        Case("index mask", lambda x: x[x > 0], [tensor()], dims=1),
        Case("index rows by mask", lambda x: x[x[:, 0] > 0], [rows]),
        Inplace("index assign number", assigned, [rows, index(3, end=6), const(2)]),
        Inplace("index assign nothing", assigned, [rows, index(0, end=6), const(2)]),
        Inplace("mask assign", lambda x: assigned(x, x > 0, 7), [tensor()], dims=1),
        Inplace("mask assign rows", lambda x, v: assigned(x, x[:, 0] > 2, v), [rows, sized(1, 8)]),
        Inplace(
            "scatter_",
            lambda x, i, v: x.scatter_(0, i.unsqueeze(1).expand(6, 8), v),
            [rows, permutation(6), sized(6, 8)],
            NUMBERS,
        ),
        Inplace("scatter_ number", lambda x, i: x.scatter_(1, i, 2), [rows, few], NUMBERS),
        Case("scatter", lambda x, i: x.scatter(1, i, 2), [rows, few]),
        *(
            Inplace(
                f"scatter_reduce_ {name}",
                partial(Tensor.scatter_reduce_, reduce=name),
                [rows, const(1), few, sized(6, 3)],
            )
            for name in ("prod", "amax")
        ),
        Inplace("masked_fill_ tensor", lambda x, m: x.masked_fill_(m, torch.full((), 2.0).to(x)), [tensor(), mask]),
        Case("where number", lambda m, x: torch.where(m, x, 2.0), [mask, tensor()]),
        Case("where one", lambda x: torch.where(x > 0)[0], [tensor()], dims=1),
        Case("sort", torch.sort, [distinct, dim], NUMBERS),
        Case("sort descending", partial(torch.sort, descending=True), [distinct, dim], NUMBERS),
        Case("argsort", torch.argsort, [distinct], NUMBERS),
        Case("topk", lambda x: torch.topk(x, min(3, x.shape[-1])), [distinct], NUMBERS, dims=1, empty=False),
        Case("topk smallest", lambda x: torch.topk(x, 1, 0, largest=False), [distinct], NUMBERS, dims=1, empty=False),
        Case(
            "unique rows",
            partial(torch.unique, dim=0, return_inverse=True, return_counts=True),
            [sized(9, 2)],
            INTEGERS,
        ),
        Case("repeat_interleave each", lambda x, n: x.repeat_interleave(n), [sized(6), index(6, end=4)], NUMBERS),
        Case("cat nothing", lambda a, b: torch.cat((a, b)), [sized(0), sized(3, 4)], NUMBERS),
        Case("pad", lambda x: functional.pad(x, (1, 2, 0, 1), value=3), [sized(3, 4)], NUMBERS),
        Case("pad negative", lambda x: functional.pad(x, (-1, 2)), [sized(3, 4)], NUMBERS),
        Case("triu mask", lambda x: torch.ones(x.shape[-1], 6, device=x.device, dtype=torch.bool).triu(1), [sized(4)]),
    ]


UNARY_OF_LISTS = """
abs acos asin atan cos cosh erf erfc exp expm1 log log10 log1p log2 neg reciprocal sigmoid sign sin sinh sqrt tan tanh
"""


def of_lists() -> list[Case]:
    """Return cases of operations on lists, of one or two tensors."""

    def call(name: str, *makers: Callable[..., Any]) -> Callable[..., Any]:
        function = getattr(torch, f"_foreach_{name}")
        return lambda *given: [one for maker in makers for one in function(*maker(*given))]

    def case(name: str, *makers: Callable[..., Any]) -> Case:
        return Case(f"foreach {name}", call(name, *makers), [tensor(0.5, 3), tensor(0.5, 3)], scale=4)

    two = ("add", "sub", "mul", "div", "pow")
    one = [tensor(0.1, 0.9)]
    return [
        *(
            Case(f"foreach {name}", call(name, lambda x: ([x, x[:1]],)), one, dims=1, scale=4)
            for name in UNARY_OF_LISTS.split()
        ),
        *(
            case(name, lambda x, y: ([x, y], 1.5), lambda x, y: ([x, y], [1.5, 2.0]))
            for name in ("clamp_min", "clamp_max")
        ),
        *(
            case(name, lambda x, y: ([x, y], [y, x]), lambda x, y: ([x, y], 1.5), lambda x, y: ([x, y], [1.5, 2.0]))
            for name in two
        ),
        *(case(name, lambda x, y: ([x, y], [y, x])) for name in ("maximum", "minimum")),
        *(
            case(name, lambda x, y: ([x], [y], [y], 0.5), lambda x, y: ([x], [y], [x], [0.5]))
            for name in ("addcmul", "addcdiv")
        ),
        case("lerp", lambda x, y: ([x], [y], 0.5), lambda x, y: ([x], [y], [y])),
        Case("foreach norm", call("norm", lambda x: ([x],), lambda x: ([x], 1)), one, FLOATS[:1], scale=4),
        Inplace("foreach zero", lambda x: torch._foreach_zero_([x]), [tensor()]),
    ]


FAMILIES = (with_numbers, pointwise, reductions_and_products, indexing, of_lists)
CASES = [case for family in FAMILIES for case in family()]
