"""Cases for reductions, products, norms, losses and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from helpers.emulator.aten_draw import FLOATS, INTEGERS, NUMBERS, Case, dim, distinct, index, mask, sized, tensor


def reductions() -> list[Case]:
    cases = []
    for keep in (False, True):
        suffix = " keepdim" if keep else ""

        def along(name: str, keep: bool = keep) -> Callable[..., Any]:
            return lambda x, d: getattr(torch, name)(x, d, keepdim=keep)

        cases += [Case(name + suffix, along(name), [tensor(), dim], FLOATS) for name in ("sum", "mean")]
        cases += [Case(name + suffix, along(name), [tensor(), dim], NUMBERS, empty=False) for name in ("amax", "amin")]
        cases += [Case(name + suffix, along(name), [distinct, dim], NUMBERS, empty=False) for name in ("max", "min")]
        cases += [
            Case(name + suffix, along(name), [distinct, dim], NUMBERS, empty=False) for name in ("argmax", "argmin")
        ]
        cases += [Case(name + suffix, along(name), [mask, dim], (torch.bool,)) for name in ("any", "all")]
        cases += [Case("logsumexp" + suffix, along("logsumexp"), [tensor(), dim], FLOATS, empty=False, scale=4)]
    cases += [
        Case("sum all", torch.sum, [tensor()], NUMBERS),
        Case("sum bool", torch.sum, [mask], (torch.bool,)),
        Case("sum two", lambda x: x.sum((0, -1)), [tensor()], FLOATS, dims=2),
        Case("sum dtype", lambda x: x.sum(-1, dtype=torch.float32), [tensor()], FLOATS, dims=1),
        Case("mean all", torch.mean, [tensor()], FLOATS, empty=False),
        Case("prod", lambda x: x.prod(-1), [tensor(0.5, 1.5)], FLOATS, dims=1, scale=4),
        Case("prod all", torch.prod, [tensor(0.5, 1.5)], FLOATS, scale=4),
        Case("max all", torch.max, [tensor()], NUMBERS, empty=False),
        Case("min all", torch.min, [tensor()], NUMBERS, empty=False),
        Case("argmax all", torch.argmax, [distinct], NUMBERS, empty=False),
        Case("any all", torch.any, [mask], (torch.bool,)),
        Case("all all", torch.all, [mask], (torch.bool,)),
        Case("var", lambda x: x.var(-1), [sized(4, 7)], FLOATS, scale=4),
        Case("var uncorrected", lambda x: x.var(0, correction=0), [sized(4, 7)], FLOATS, scale=4),
        Case("var_mean", lambda x: torch.var_mean(x, -1), [sized(4, 7)], FLOATS, scale=4),
        Case("std", lambda x: x.std(-1), [sized(4, 7)], FLOATS, scale=4),
        Case("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), [sized(4, 7)], FLOATS, scale=4),
        Case("norm 1", lambda x: torch.linalg.vector_norm(x, 1), [sized(4, 7)], FLOATS, scale=4),
        Case("median", lambda x: torch.median(x, -1), [distinct], FLOATS[:1] + INTEGERS[:1], dims=1, empty=False),
        Case("kthvalue", lambda x: torch.kthvalue(x, 2, -1), [sized(3, 7)], FLOATS[:1]),
        Case("count_nonzero", torch.count_nonzero, [tensor(-1, 1)], NUMBERS),
        Case("cumsum", torch.cumsum, [tensor(), dim], NUMBERS, scale=4),
        Case("cumprod", torch.cumprod, [tensor(0.5, 1.5), dim], FLOATS[:1], scale=4),
        Case("cummax", torch.cummax, [distinct, dim], FLOATS[:1] + INTEGERS[:1]),
        Case("bincount", torch.bincount, [index(9, end=5)], (torch.int64,)),
        Case("histc", lambda x: torch.histc(x, 8, -3, 3), [sized(40, low=-3, high=3)], FLOATS[:1]),
        Case("trace", torch.trace, [sized(5, 5)], FLOATS[:1]),
        Case("diff", lambda x: torch.diff(x, dim=-1), [sized(3, 6)], FLOATS),
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
            "linear bias 3d", functional.linear, [sized(2, 4, 8), sized(5, 8), sized(5)], FLOATS[:1]
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
        Case("softmax", lambda x: x.softmax(-1), [tensor()], FLOATS, scale=4),
        Case("softmax first", lambda x: x.softmax(0), [tensor()], FLOATS, dims=1, scale=4),
        Case("softmax dtype", lambda x: x.softmax(-1, dtype=torch.float32), [tensor()], FLOATS, dims=1, scale=4),
        Case("log_softmax", lambda x: x.log_softmax(-1), [tensor()], FLOATS, dims=1, scale=4),
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
            FLOATS[:1],
            scale=8,
        ),
        Case(
            "rms_norm",
            lambda x, w: functional.rms_norm(x, (8,), w, 1e-6),
            [sized(3, 8, low=0.5), sized(8)],
            FLOATS[:1],
            scale=8,
        ),
    ]


def losses() -> list[Case]:
    same, target = sized(6, 5), index(6, end=5)
    return [
        Case("cross_entropy", functional.cross_entropy, [same, target], FLOATS[:1], scale=4),
        Case(
            "cross_entropy ignore",
            lambda x, t: functional.cross_entropy(x, t, ignore_index=2),
            [same, target],
            FLOATS[:1],
            scale=4,
        ),
        Case("nll_loss", lambda x, t: functional.nll_loss(x, t, reduction="none"), [same, target]),
        Case("mse_loss", functional.mse_loss, [same, same]),
        Case(
            "mse_loss none", lambda x, y: functional.mse_loss(x, y, reduction="none"), [tensor(), tensor()], FLOATS[:1]
        ),
        Case("l1_loss", lambda x, y: functional.l1_loss(x, y, reduction="sum"), [same, same]),
        Case("smooth_l1_loss", functional.smooth_l1_loss, [same, same], FLOATS[:1], scale=4),
        Case(
            "kl_div",
            lambda x, y: functional.kl_div(x, y.exp(), reduction="batchmean"),
            [same, same],
            FLOATS[:1],
            scale=4,
        ),
        Case(
            "bce_with_logits",
            functional.binary_cross_entropy_with_logits,
            [same, sized(6, 5, low=0)],
            FLOATS[:1],
            scale=4,
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
            FLOATS[:1],
            scale=8,
        ),
        Case("cdist", torch.cdist, [sized(5, 3), sized(4, 3)], FLOATS[:1], scale=4),
        Case(
            "complex",
            lambda x, y: torch.view_as_real(torch.complex(x, y) * torch.polar(x.abs(), y)),
            [same, same],
            FLOATS[:1],
            scale=4,
        ),
    ]
