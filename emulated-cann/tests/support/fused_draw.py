"""Random inputs of the fused operations, their transfer to the NPU, and comparison of results.

A case is a function that draws inputs, runs one operation and yields pairs of a result and its expected value.
:func:`parameters` parametrizes a test with every dtype, every combination of axes, and every seed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
SEEDS = (0, 1)
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


@attrs.frozen
class Near:
    """Expects a float64 result within rounding, times `scale` for results of several roundings."""

    value: Tensor
    scale: float = 1

    def check(self, actual: Tensor) -> None:
        bound = ROUNDING[actual.dtype] * self.scale
        torch.testing.assert_close(
            actual.double(), self.value.double(), rtol=bound, atol=bound, check_dtype=False, equal_nan=True
        )


@attrs.frozen
class Rounded:
    """Expects the integers nearest to a float64 result, clamped.

    Ties, also those due to float32, may round either way.
    """

    value: Tensor
    low: int = -128
    high: int = 127

    def check(self, actual: Tensor) -> None:
        assert not actual.is_floating_point()
        assert actual.shape == self.value.shape
        distance = (actual.double() - self.value.double().clamp(self.low, self.high)).abs()
        assert distance.max().item() <= 0.5 + 2e-3 * max(1.0, self.high / 127)


@attrs.frozen
class Same:
    """Expects exactly this tensor."""

    value: Tensor

    def check(self, actual: Tensor) -> None:
        torch.testing.assert_close(actual, self.value, rtol=0, atol=0, equal_nan=True)


Pairs = Iterator[tuple[Tensor, Near | Rounded | Same]]


class Draw:
    """The random parts of a case."""

    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {dtype} {seed}".encode()))
        self.dtype = dtype

    def below(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self.generator))

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.below(len(options))]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def positive(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return numbers between 0.5 and 1.5."""
        return (torch.rand(shape, generator=self.generator) + 0.5).to(dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator, dtype=dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)

    def strided(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the NPU: contiguous, transposed, or as columns or rows of a larger tensor."""
        kind = self.below(4) if tensor.dim() > 1 else 0
        if kind == 1:
            return tensor.transpose(0, -1).contiguous().npu().transpose(0, -1)
        if kind == 2:
            return torch.nn.functional.pad(tensor, (3, 2)).npu()[..., 3:-2]
        if kind == 3:
            return torch.cat([tensor, tensor, tensor]).npu()[tensor.shape[0] : 2 * tensor.shape[0]]
        return tensor.npu()


@attrs.frozen
class Case:
    """One operation's test, its types and its axes."""

    run: Callable[..., Pairs]
    dtypes: Sequence[torch.dtype]
    axes: dict[str, Sequence[Any]]


CASES: list[Case] = []


def case(*dtypes: torch.dtype, **axes: Sequence[Any]) -> Callable[[Callable[..., Pairs]], Callable[..., Pairs]]:
    """Register a case for these dtypes and every combination of the axes."""

    def register(run: Callable[..., Pairs]) -> Callable[..., Pairs]:
        CASES.append(Case(run, dtypes, axes))
        return run

    return register


def parameters(module: str) -> Iterator[Any]:
    """Return the parameters of every case that a module registered: function, axis values, dtype and seed."""
    for each in CASES:
        if each.run.__module__ != module:
            continue
        for values in itertools.product(*each.axes.values()):
            arguments = dict(zip(each.axes, values, strict=True))
            name = "-".join([each.run.__name__, *(f"{key}={value}" for key, value in arguments.items())])
            for dtype, seed in itertools.product(each.dtypes, SEEDS):
                label = str(dtype).removeprefix("torch.")
                yield pytest.param(each.run, arguments, dtype, seed, id=f"{name}-{label}-seed{seed}")


def optional(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.npu()


def soil_memory() -> None:
    """Fill the memory that the allocator hands out next with NaN, so that no output starts as zeros."""
    blocks = [
        torch.full((size,), torch.nan, device="npu") for size in (128, 1024, 8192, 65536, 1 << 20) for _ in range(6)
    ]
    del blocks


def check(run: Callable[..., Pairs], arguments: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    """Run a case, and check everything that it yields."""
    soil_memory()
    checked = 0
    for actual, expected in run(Draw(f"{run.__name__} {arguments}", dtype, seed), **arguments):
        expected.check(actual.cpu())
        checked += 1
    assert checked, "a case must yield at least one result"
