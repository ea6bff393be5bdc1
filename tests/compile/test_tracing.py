"""Tests that Dynamo traces every call of an operation as one node, in a function and in a whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal import ops


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    yield []
    torch.compiler.reset()


def compiled(function: Any, graphs: list[torch.fx.GraphModule]) -> Any:
    """Compile ``function`` with Dynamo without graph breaks; the graphs are recorded and run unchanged."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True)


def operations_in(graph: torch.fx.GraphModule) -> list[str]:
    names = (str(node.target) for node in graph.graph.nodes)
    return [name.split(".")[1] for name in names if name.startswith("hal.")]


def test_one_node_a_call(cpu: hal.Backend, graphs: list[torch.fx.GraphModule]) -> None:
    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        normed, hidden = ops.add_rms_norm(x, residual, weight, 1e-6)
        return ops.silu_and_mul(normed) + ops.rms_norm(hidden, weight, eps=1e-6)[..., :4]

    arguments = torch.randn(2, 8), torch.randn(2, 8), torch.ones(8)
    with torch.no_grad():
        found = compiled(layer, graphs)(*arguments)
    torch.testing.assert_close(found, layer(*arguments))
    assert operations_in(graphs[0]) == ["add_rms_norm", "silu_and_mul", "rms_norm"]


def test_a_default_and_a_keyword_are_the_calls_own(cpu: hal.Backend, graphs: list[torch.fx.GraphModule]) -> None:
    def project(x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(weight=weight, x=x)

    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(project, graphs)(x, weight), x @ weight.T)
    assert operations_in(graphs[0]) == ["linear"]
