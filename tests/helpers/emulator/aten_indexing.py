"""Cases for indexing, scattering, masks, sorting and counting."""

from __future__ import annotations

import torch
from torch.nn import functional

from helpers.emulator.aten_draw import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    Case,
    broadcast,
    dim,
    distinct,
    index,
    mask,
    permutation,
    sized,
    tensor,
)


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
        Case("index mask", lambda x: x[x > 0], [tensor()], FLOATS, dims=1),
        Case("index rows by mask", lambda x: x[x[:, 0] > 0], [rows]),
        Case("masked_select", lambda x, m: torch.masked_select(x, m), [tensor(), mask], NUMBERS),
        Case("nonzero", lambda x: x.nonzero(), [tensor(-1, 1)], (*INTEGERS, torch.bool)),
        Case("where one", lambda x: torch.where(x > 0)[0], [tensor()], FLOATS, dims=1),
        Case("index_put", lambda x, i, v: x.index_put((i,), v), [rows, permutation(6), sized(6, 8)], NUMBERS),
        Case(
            "index_put_ add",
            lambda x, i, v: x.index_put_((i,), v, accumulate=True),
            [rows, index(9, end=6), sized(9, 8)],
            FLOATS[:1] + INTEGERS,
            inplace=True,
        ),
        Case("index assign number", lambda x, i: x.__setitem__(i, 2), [rows, index(3, end=6)], inplace=True),
        Case("index assign nothing", lambda x, i: x.__setitem__(i, 2), [rows, index(0, end=6)], inplace=True),
        Case("mask assign", lambda x: x.__setitem__(x > 0, 7), [tensor()], FLOATS, dims=1, inplace=True),
        Case("mask assign rows", lambda x, v: x.__setitem__(x[:, 0] > 2, v), [rows, sized(1, 8)], inplace=True),
        Case(
            "index_copy_",
            lambda x, i, v: x.index_copy_(0, i, v),
            [rows, permutation(6), sized(6, 8)],
            NUMBERS,
            inplace=True,
        ),
        Case("index_fill_", lambda x, i: x.index_fill_(0, i, 2), [rows, index(3, end=6)], inplace=True),
        Case(
            "index_add_",
            lambda x, i, v: x.index_add_(0, i, v, alpha=2),
            [rows, index(9, end=6), sized(9, 8)],
            FLOATS[:1] + INTEGERS,
            inplace=True,
        ),
        Case(
            "scatter_",
            lambda x, i, v: x.scatter_(0, i.unsqueeze(1).expand(6, 8), v),
            [rows, permutation(6), sized(6, 8)],
            NUMBERS,
            inplace=True,
        ),
        Case("scatter_ number", lambda x, i: x.scatter_(1, i, 2), [rows, index(6, 3, end=8)], NUMBERS, inplace=True),
        Case("scatter", lambda x, i: x.scatter(1, i, 2), [rows, index(6, 3, end=8)]),
        Case(
            "scatter_add_",
            lambda x, i, v: x.scatter_add_(1, i, v),
            [rows, index(6, 3, end=8), sized(6, 3)],
            FLOATS + INTEGERS,
            inplace=True,
        ),
        Case(
            "scatter_reduce amax",
            lambda x, i, v: x.scatter_reduce(1, i, v, "amax"),
            [rows, index(6, 3, end=8), sized(6, 3)],
            FLOATS[:1],
        ),
        Case("masked_fill", lambda x, m: x.masked_fill(m, -2), [tensor(), mask], NUMBERS),
        Case(
            "masked_fill_ tensor",
            lambda x, m: x.masked_fill_(m, torch.full((), 2.0, device=x.device)),
            [tensor(), mask],
            FLOATS,
            inplace=True,
        ),
        Case(
            "masked_scatter_", lambda x, m, v: x.masked_scatter_(m, v), [tensor(), mask, tensor()], FLOATS, inplace=True
        ),
        Case("where", torch.where, [mask, tensor(), broadcast()], NUMBERS),
        Case("where number", lambda m, x: torch.where(m, x, 2.0), [mask, tensor()], FLOATS),
        Case("one_hot", lambda i: functional.one_hot(i, 7), [index(3, 4, end=7)], (torch.int64,)),
        Case("searchsorted", lambda s, x: torch.searchsorted(s.sort()[0], x), [sized(9), sized(3, 4)], FLOATS[:1]),
        Case(
            "bucketize", lambda x, b: torch.bucketize(x, b.sort()[0], right=True), [sized(3, 4), sized(9)], FLOATS[:1]
        ),
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
