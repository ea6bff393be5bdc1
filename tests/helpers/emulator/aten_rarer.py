"""Cases for rarely used in-place and mixed forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from helpers.emulator.aten_draw import (
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


def rarer() -> list[Case]:
    """Return cases for rarely used in-place and mixed forms."""
    cases = []
    for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_"):
        cases.append(Case(name, getattr(Tensor, name), [tensor(-2, 2), broadcast(-2, 2)], NUMBERS, inplace=True))
        cases.append(Case(name + " number", getattr(Tensor, name), [tensor(-2, 2), const(1)], NUMBERS, inplace=True))
    for name in ("logical_and_", "logical_or_"):
        cases.append(Case(name, getattr(Tensor, name), [mask, mask], (torch.bool,), inplace=True))
    for name in ("bitwise_and_", "bitwise_or_", "bitwise_xor_"):
        cases.append(Case(name, getattr(Tensor, name), [tensor(0, 99), broadcast(0, 99)], INTEGERS, inplace=True))
        cases.append(Case(name + " number", getattr(Tensor, name), [tensor(0, 99), const(6)], INTEGERS, inplace=True))
    for name in ("remainder_", "fmod_", "floor_divide_"):
        cases.append(Case(name, getattr(Tensor, name), [tensor(-9, 9), broadcast(1, 4)], INTEGERS, inplace=True))
        cases.append(Case(name + " number", getattr(Tensor, name), [tensor(-9, 9), const(4)], INTEGERS, inplace=True))
    for name in ("addcmul_", "addcdiv_"):
        cases.append(Case(name, getattr(Tensor, name), [tensor(), tensor(), broadcast(1, 3)], FLOATS, inplace=True))
    for name, numbers in {"clamp_min_": (0,), "clamp_max_": (1,), "hardtanh_": (-1, 1), "leaky_relu_": (0.1,)}.items():
        function = getattr(functional, name) if hasattr(functional, name) else getattr(Tensor, name)
        cases.append(Case(name, function, [tensor(), *map(const, numbers)], FLOATS, inplace=True, scale=4))
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

        cases.append(Case(name + "_", call, [tensor()], FLOATS, inplace=True, scale=4))
    volume = sized(2, 3, 4, 5)
    cases += [
        Case("add a number first", lambda x: torch.add(torch.tensor(1.5), x, alpha=2), [tensor()], FLOATS),
        Case("rsub tensor", torch.rsub, [tensor(), broadcast()], FLOATS),
        Case("floor_divide tensors", torch.floor_divide, [tensor(-9, 9), broadcast(1, 4)], INTEGERS),
        Case("div_ number", lambda x: x.div_(3), [tensor()], FLOATS, inplace=True),
        Case(
            "div_ floor",
            lambda x, y: x.div_(y, rounding_mode="floor"),
            [tensor(-9, 9), broadcast(1, 4)],
            INTEGERS,
            inplace=True,
        ),
        Case("div_ trunc number", lambda x: x.div_(2, rounding_mode="trunc"), [tensor(-9, 9)], INTEGERS, inplace=True),
        Case("pow_ tensor", Tensor.pow_, [tensor(0.5, 2), broadcast(-2, 2)], FLOATS, inplace=True, scale=4),
        Case("atan2_", Tensor.atan2_, [tensor(), broadcast()], FLOATS[:1], inplace=True, scale=4),
        Case(
            "xlogy numbers",
            lambda x: (torch.xlogy(x, 2.0), torch.xlogy(2.0, x), x.xlogy_(3.0)),
            [tensor(0.5, 3)],
            FLOATS[:1],
            scale=4,
        ),
        Case("logaddexp2", torch.logaddexp2, [tensor(), broadcast()], FLOATS[:1], scale=4),
        Case("shift tensors", lambda x, y: (x << y, x >> y), [tensor(0, 99), broadcast(0, 4)], INTEGERS),
        Case("isin number in tensor", lambda x: torch.isin(2, x), [tensor()], INTEGERS),
        Case("lerp tensors", torch.lerp, [tensor(), tensor(), tensor(0, 1)], FLOATS),
        Case("lerp_", lambda x, y: x.lerp_(y, 0.3), [tensor(), tensor()], FLOATS, inplace=True),
        Case("lerp_ tensors", Tensor.lerp_, [tensor(), tensor(), tensor(0, 1)], FLOATS, inplace=True),
        Case(
            "nan_to_num_",
            lambda x: x.div_(x.round()).nan_to_num_(5, 6, 7),
            [tensor(-1.4, 1.4)],
            FLOATS[:1],
            inplace=True,
        ),
        Case("round_ decimals", lambda x: x.round_(decimals=1), [tensor()], FLOATS[:1], inplace=True),
        Case("prelu", functional.prelu, [sized(3, 4), sized(4)]),
        Case("softshrink", functional.softshrink, [tensor()]),
        Case("hardshrink", functional.hardshrink, [tensor()]),
        Case("logit", torch.logit, [tensor(0.1, 0.9)], FLOATS[:1], scale=8),
        Case(
            "clamp_min tensors",
            lambda x, y: (x.clamp_min(y), x.clamp_max(y), x.clamp_min(0), x.clamp_max(0)),
            [tensor(), tensor()],
        ),
        Case(
            "clamp_min_ tensors",
            lambda x, y, z: x.clamp_min_(y).clamp_max_(z),
            [tensor(), tensor(), tensor()],
            inplace=True,
        ),
        Case("aminmax", lambda x: (*torch.aminmax(x), *torch.aminmax(x, dim=-1)), [tensor()], FLOATS, empty=False),
        Case(
            "nansum",
            lambda x: torch.nansum(x / x.round(), -1),
            [tensor(-1.4, 1.4, torch.float32)],
            FLOATS[:1],
            dims=1,
            scale=8,
        ),
        Case("median all", lambda x: (x.median(), x.nanmedian()), [distinct], FLOATS[:1], empty=False),
        Case("nanmedian", lambda x: torch.nanmedian(x, -1), [distinct], FLOATS[:1], dims=1, empty=False),
        Case("std_mean", lambda x: torch.std_mean(x, -1), [sized(4, 7)], FLOATS[:1], scale=4),
        Case("cummin", torch.cummin, [distinct, dim], FLOATS[:1] + INTEGERS[:1]),
        Case("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), [sized(4, 6)], FLOATS[:1], scale=4),
        Case("renorm_", lambda x: x.renorm_(1, 1, 1.0), [sized(4, 6)], FLOATS[:1], inplace=True, scale=4),
        Case("addmm_", Tensor.addmm_, [sized(4, 5), sized(4, 8), sized(8, 5)], inplace=True),
        Case("addmv", torch.addmv, [sized(4), sized(4, 8), sized(8)]),
        Case("addr", torch.addr, [sized(4, 5), sized(4), sized(5)]),
        Case("addr_", Tensor.addr_, [sized(4, 5), sized(4), sized(5)], FLOATS[:1], inplace=True),
        Case(
            "cholesky",
            lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4, device=x.device, dtype=x.dtype)),
            [sized(2, 4, 4)],
            FLOATS[:1],
            scale=8,
        ),
        Case("cross", lambda x, y: torch.linalg.cross(x, y), [sized(5, 3), sized(5, 3)], FLOATS[:1]),
        Case("angle", torch.angle, [tensor()], FLOATS[:1]),
        Case("index_copy", lambda x, i, v: x.index_copy(0, i, v), [sized(6, 8), permutation(6), sized(6, 8)], NUMBERS),
        Case("index_fill", lambda x, i: x.index_fill(0, i, 2), [sized(6, 8), index(3, end=6)]),
        Case("put_", lambda x, i, v: x.put_(i, v), [sized(6, 8), permutation(8), sized(8)], inplace=True),
        Case(
            "scatter_reduce_",
            lambda x, i, v: x.scatter_reduce_(1, i, v, "prod"),
            [sized(6, 8), index(6, 3, end=8), sized(6, 3)],
            FLOATS[:1],
            inplace=True,
        ),
        Case("searchsorted number", lambda s: torch.searchsorted(s.sort()[0], 0.1), [sized(9)], FLOATS[:1]),
        Case(
            "unique rows",
            lambda x: torch.unique(x, dim=0, return_inverse=True, return_counts=True),
            [sized(9, 2)],
            INTEGERS,
        ),
        Case("repeat_interleave each", lambda x, n: x.repeat_interleave(n), [sized(6), index(6, end=4)], NUMBERS),
        Case("triu_ tril_", lambda x: x.triu_(-1).tril_(1), [sized(5, 4)], NUMBERS, inplace=True),
        Case("channel_shuffle", lambda x: functional.channel_shuffle(x, 2), [sized(2, 4, 3, 3)], FLOATS[:1]),
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
            FLOATS[:1],
        ),
        Case(
            "logspace range",
            lambda x: (torch.logspace(0, 2, 5, device=x.device), torch.range(1, 4, device=x.device)),
            [sized()],
            FLOATS[:1],
            scale=4,
        ),
        Case(
            "batch_norm",
            lambda x, m, v: functional.batch_norm(x, m, v),
            [sized(6, 4), sized(4), sized(4, low=0.5)],
            FLOATS[:1],
            scale=8,
        ),
        Case(
            "batch_norm training",
            lambda x: functional.batch_norm(x, None, None, training=True),
            [sized(6, 4)],
            FLOATS[:1],
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
