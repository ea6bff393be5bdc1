"""Tests of the pass that computes with complex numbers as pairs of real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hal.compile.recognize.rotations import complex_pairs, polar

aten = torch.ops.aten


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.polar(torch.ones_like(angles), angles) * 0.5
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * turns[:, None].to(numbers.device)).flatten(2)


def parts(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.polar(angles.abs(), angles).unsqueeze(-2)
    both = torch.cat((torch.view_as_real(turns[..., 0, 1:3]), torch.view_as_real(turns.select(-1, 2))), 1)
    return torch.view_as_real(turns.view(-1, 2, angles.shape[-1] // 2).expand(-1, 2, -1)).sum() + both


def traced(function: Callable[..., Tensor], *given: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="symbolic", decomposition_table={aten.polar.default: polar})(*given)


@pytest.mark.parametrize("function", [rotated, parts])
def test_the_same_numbers_without_complex_tensors(function: Callable[..., Tensor]) -> None:
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 4)
    graph = traced(function, x, angles)
    assert any(node.meta["val"].is_complex() for node in graph.graph.nodes if _is_tensor(node))
    assert complex_pairs(graph) >= 4
    graph.graph.lint()
    graph.recompile()
    assert not any(node.meta["val"].is_complex() for node in graph.graph.nodes if _is_tensor(node))
    for rows in (5, 2, 7):
        given = torch.randn(rows, 3, 8), torch.randn(rows, 4)
        torch.testing.assert_close(graph(*given), function(*given))
    assert complex_pairs(graph) == 0


@pytest.mark.parametrize(
    "function", [lambda x, _: torch.view_as_complex(x.unflatten(-1, (-1, 2))), lambda x, _: torch.fft.fft(x).abs()]
)
def test_results_and_other_functions_keep_complex_tensors(function: Callable[..., Tensor]) -> None:
    given = torch.randn(5, 3, 8), torch.randn(5, 4)
    graph = traced(function, *given)
    code = graph.code
    assert complex_pairs(graph) == 0
    assert graph.code == code


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
