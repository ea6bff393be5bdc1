"""Tests of torch.compile on functions that take no tensor: Dynamo's graphs then have numbers as inputs, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.thorough import MODE, thorough
from torch import Tensor

import hal


@pytest.fixture(scope="module")
def cpu() -> hal.Backend:
    return hal.open({"backend": "cpu", "dtype": "float32"})


@pytest.fixture(autouse=True)
def dynamo(cpu: hal.Backend) -> Iterator[None]:
    cpu.activate()
    yield
    torch.compiler.reset()


def nothing() -> Tensor:
    return torch.arange(4, device="cpu").flip(0) + torch.tensor([1, 2, 3, 4])


def positions(length: int) -> Tensor:
    return torch.arange(length) * 2


def mask(length: int) -> Tensor:
    return torch.ones(length, length).tril().view(-1, 1)


def written(length: int) -> tuple[Tensor, int]:
    made = torch.zeros(length, 2)
    made[1:].add_(torch.arange(length - 1)[:, None])
    return made, length * 2


def drawn(length: int) -> Tensor:
    torch.manual_seed(3)
    return torch.rand(length)


def numbers(length: int) -> tuple[Tensor, float]:
    return torch.full((2, length), length / 4), length / 4


def after_a_break(length: int) -> tuple[Tensor, Tensor]:
    total = torch.ones(length).sum()
    torch._dynamo.graph_break()
    return torch.arange(length) + 1, total


def before_a_break(x: Tensor, length: int) -> Tensor:
    places = torch.arange(length)
    torch._dynamo.graph_break()
    return x[places] * 2


@thorough(MODE, r"-False\]")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [positions, mask, written, drawn, numbers, after_a_break])
def test_numbers_alone(function: Callable[[int], Any], dynamic: bool) -> None:
    compiled = torch.compile(function, backend="hal", dynamic=dynamic)
    for length in (5, 3):
        torch.testing.assert_close(compiled(length), function(length))


def test_no_input() -> None:
    compiled = torch.compile(nothing, backend="hal", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(), nothing())
        compiled().zero_()  # what the graph returns is the caller's


def test_a_part_before_a_break() -> None:
    x = torch.randn(6)
    torch.testing.assert_close(torch.compile(before_a_break, backend="hal")(x, 4), before_a_break(x, 4))


def test_with_inductor() -> None:
    compiled = torch.compile(positions, backend="hal", dynamic=True, options={"compiler": "inductor"})
    with torch.inference_mode():
        for length in (5, 3):
            torch.testing.assert_close(compiled(length), positions(length))
