"""Tests for graph normalization: the canonical form of each operation, and unchanged results and mutations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.rewriting import Traced, mixture, trace
from helpers.thorough import DRAW, thorough
from torch import Tensor

from hal.compile.fx.alias_analysis import AliasAnalysis
from hal.compile.fx.normalize import normalize

aten = torch.ops.aten


def normalized(function: Callable[..., Any], *inputs: Tensor) -> Traced:
    """Return a normalized trace with symbolic rows.

    A second normalization changes nothing, and results are unchanged.
    """
    traced = trace(function, *inputs, rows=range(len(inputs)))
    sizes = traced.mode.shape_env
    assert sizes is not None
    with getattr(sizes, "error_on_new_guards", nullcontext)():  # torch 2.11 does not have it
        normalize(traced.graph.graph)
    traced.graph.graph.lint()
    traced.graph.recompile()
    code = str(traced.graph.graph)
    normalize(traced.graph.graph)
    assert str(traced.graph.graph) == code
    for rows in (1, 4, 9):
        traced.check([each.repeat(3, *[1] * (each.dim() - 1))[:rows] for each in inputs])
    return traced


def table(rows: int = 4, width: int = 24) -> Tensor:
    return torch.arange(rows * width, dtype=torch.float32).view(rows, width)


def test_parts_are_slices_of_the_tensor() -> None:
    def function(x: Tensor) -> Any:
        middle = x[:, 8:16]
        heads = x.view(-1, 3, 8)
        split = heads.split([1, 2], dim=1)
        return tuple(
            each.reshape(-1, 8).exp()
            for each in (
                middle,
                x.split(8, dim=1)[1],
                x.split([8, 16], 1)[1].chunk(2, dim=-1)[0],
                torch.narrow(x, 1, 8, 8),
                heads[:, 1],
                heads.select(1, 1),
                heads.unbind(1)[1],
                heads[:, 1:2].flatten(1),
                split[1][:, 0],
                x[:, :16][:, 8:],
                x.unflatten(1, (3, 2, 4))[:, 1].flatten(1),
                x.chunk(3, 1)[1],
                x.tensor_split(3, 1)[1],
            )
        )

    traced = normalized(function, table())
    slices = [node.args for node in traced.graph.graph.nodes if node.target is aten.slice.Tensor]
    (x,) = (node for node in traced.graph.graph.nodes if node.op == "placeholder")
    assert len(slices) == 13
    assert set(slices) == {(x, 1, 8, 16)}
    assert set(traced.calls()) == {"slice.Tensor", "exp"}


def test_views_of_views_are_one() -> None:
    def function(x: Tensor) -> Any:
        a = x.view(-1, 4, 6).flatten(1).unflatten(-1, (3, 8)).unsqueeze(1)
        b = x.unsqueeze(0).squeeze(0).reshape(x.shape[0], 24)
        c = x.view(x.shape[0], 2, 12).view(-1, 12)[:, None]
        return a.exp(), b.exp(), c.exp()

    traced = normalized(function, table())
    views = [node for node in traced.graph.graph.nodes if node.target is aten.view.default]
    (x,) = (node for node in traced.graph.graph.nodes if node.op == "placeholder")
    assert [node.args[1] for node in views] == [[-1, 1, 3, 8], [-1, 1, 12]]
    assert all(node.args[0] is x for node in views)


def test_a_slice_that_no_slice_of_the_source_is() -> None:
    """Rows of a view that mixes rows and columns, and columns across heads, are not changed."""

    def function(x: Tensor) -> Any:
        return x.view(-1, 3, 8)[:, :, 2:5].exp(), x.view(-1)[3:7].exp(), x.t()[1:3].exp(), x[:, ::2].exp()

    traced = normalized(function, table())
    assert traced.calls()["slice.Tensor"] == 4


def test_sizes_are_asked_of_inputs() -> None:
    def function(x: Tensor) -> Any:
        y = x.exp()
        z = y.view(y.shape[0] * 2, 12)
        return z.sin(), torch.zeros(y.shape[0], 2)

    traced = normalized(function, table())
    asking = [node for node in traced.graph.graph.nodes if node.target is aten.sym_size.int]
    assert [node.args[0].op for node in asking] == ["placeholder"]


@pytest.mark.parametrize("name", ["add_", "sub_", "mul_", "div_"])
def test_in_place_becomes_out_of_place(name: str) -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        hidden = x.exp()
        getattr(hidden, name)(y)
        getattr(hidden, name)(2.5)
        return hidden.view(-1, 2, 12).sin(), hidden

    traced = normalized(function, table(), table() + 1)
    assert name + ".Tensor" not in traced.calls()
    assert traced.calls()[name[:-1] + ".Tensor"] == 2


def test_a_long_chain_in_place() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        hidden = x.exp()
        for _ in range(20):
            hidden += hidden.view(-1, 2, 12).sin().view(-1, 24)
            hidden = hidden.mul_(y)
        return hidden

    traced = normalized(function, table() / 100, table() / 100)
    assert traced.calls() == {"exp": 1, "add.Tensor": 20, "mul.Tensor": 20, "sin": 20, "view": 40}


def into_a_view(x: Tensor) -> Any:
    hidden = x.exp()
    hidden[:, 2:4].add_(1)
    return hidden


def beside_a_view_that_is_returned(x: Tensor) -> Any:
    hidden = x.exp()
    view = hidden.view(-1)
    hidden.add_(1)
    return view


def beside_a_view_of_a_view_that_is_read_later(x: Tensor) -> Any:
    hidden = x.exp()
    view = hidden.view(-1, 2, 12)[:, 0]
    hidden.add_(1)
    return view.sin(), hidden


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (into_a_view, 1),
        (beside_a_view_that_is_returned, 1),
        (beside_a_view_of_a_view_that_is_read_later, 1),
        (lambda x, y: x.add_(y).sin(), 2),
        (lambda x, y: (x[:, 2:4].add_(1), y.sin())[1], 2),
        (lambda x, y: x.bfloat16().add_(y), 2),
    ],
)
def test_in_place_stays(function: Callable[..., Any], tensors: int) -> None:
    """Into inputs, views, and other dtypes, and beside views."""
    assert normalized(function, *[table()] * tensors).calls()["add_.Tensor"] == 1


def test_in_place_into_what_is_turned_stays() -> None:
    """The sum would have other strides, and a later view might not be valid."""

    def function(x: Tensor) -> Any:
        hidden = torch.empty_like(x.t().contiguous().t()).copy_(x)
        return torch.ops.aten.add_(hidden, 1.0)

    traced = trace(function, table())
    normalize(traced.graph.graph)
    assert traced.calls()["add_.Tensor"] == 1


def test_two_parts_of_a_tuple_are_two_memories() -> None:
    def function(x: Tensor) -> Any:
        values, indices = x.sort(dim=1)
        values.add_(1)
        indices.mul_(2)
        return values, indices

    assert {"add.Tensor", "mul.Tensor"} <= set(normalized(function, table()).calls())


def test_a_copy_that_is_written_stays() -> None:
    def function(x: Tensor) -> Any:
        copy = torch.ops.aten._to_copy(x, dtype=x.dtype)
        copy[:, 0].mul_(2)
        kept = torch.ops.aten._to_copy(x, dtype=x.dtype)
        return copy, kept.sin(), torch.ops.aten._to_copy(x, dtype=x.dtype)

    assert normalized(function, table()).calls()["_to_copy"] == 2  # the written and the returned one


def test_what_does_more_than_compute_stays() -> None:
    with torch.library._scoped_library("normalize_tests", "FRAGMENT") as library:
        library.define("note(Tensor x) -> ()")
        library.impl("note", lambda x: None, "CompositeExplicitAutograd")

        def function(x: Tensor) -> Any:
            torch.ops.normalize_tests.note(x)
            torch.rand(3)
            x.exp()
            return x + 1

        traced = normalized(function, table())
        assert {"note", "rand", "add.Tensor"} == set(traced.calls())


@thorough(DRAW, r"\[[1-3]\d\]")
@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_views_and_writes(seed: int) -> None:
    normalized(mixture(seed), table() / 50, table() / 70)


def test_memory_that_views_share() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        view = x[:, 2:5].t()
        fresh = x * 2
        view.mul_(3)
        return fresh, x.view(-1)

    traced = trace(function, table(), table())
    memory = AliasAnalysis(traced.graph.graph)
    nodes = {node.name: node for node in traced.graph.graph.nodes}
    (x, y) = (node for node in traced.graph.graph.nodes if node.op == "placeholder")
    assert memory.places(nodes["t"]) == memory.places(x)
    assert set(memory.places(y)).isdisjoint(memory.places(x))
    assert set(memory.places(nodes["mul"])).isdisjoint(memory.places(x))
    assert [node.name for node in memory.writers(x)] == ["mul_"]
    first = next(node for node in nodes.values() if node.target is aten.slice.Tensor)
    assert memory.between(first, nodes["mul_"], {nodes["mul"]}) is None
    assert "writes to memory" in str(
        memory.between(first, next(iter(nodes["mul_"].users), nodes["output"]), {nodes["mul"]})
    )
