"""Tests for the pass manager: a vendor's rewrites, functions with options, refusals, and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.rewriting import Traced, rewrite_of, trace
from torch import Tensor, fx

from hal import ops
from hal.compile.pass_manager import PassManager, PassReport, Report
from hal.compile.rewrite.proof import check_rewrite
from hal.compile.rewrite.rewrite import Rewrite
from hal.errors import CompileError
from hal.ops import FLOATING, Draw, Sample

aten = torch.ops.aten


def scaled_samples(draw: Draw) -> Iterator[Sample]:
    for rows, width in ((1, 64), (6, 128)):
        yield draw.normal(rows, width), draw.normal(width), 1.5


def narrow_samples(draw: Draw) -> Iterator[Sample]:
    yield draw.normal(3, 48), draw.normal(48), 1.5


def scaled(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return x * factor * weight


def scaled_otherwise(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return (weight * x) * factor


def only_wide(x: Tensor, weight: Tensor, factor: float) -> str | None:
    return f"the width {x.shape[-1]} is no multiple of 64" if x.shape[-1] % 64 else None


DECLARED: dict[str, Any] = {"axes": {"x": "rows width", "weight": "width"}, "dtypes": {"x": FLOATING, "weight": "x"}}
VENDORS = Rewrite("scaled", scaled, scaled_otherwise, scaled_samples, only_wide, narrow_samples, **DECLARED)


def layers(width: int) -> Traced:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        for factor in (2.0, 3.0):
            x = (factor * x).mul(weight).sin()
        return x

    draw = Draw(seed=1)
    return trace(function, draw.normal(4, width), draw.normal(width), rows=(0,))


def test_a_vendors_rewrite_is_proved() -> None:
    check_rewrite(VENDORS)


def test_a_vendors_rewrite_is_applied() -> None:
    traced = layers(128)
    report = traced.apply(VENDORS)
    assert len(report["scaled"].matches) == 2
    factors = [node.args[1] for node in traced.graph.graph.nodes if node.target is aten.mul.Tensor][1::2]
    assert factors == [2.0, 3.0]
    torch.testing.assert_close(traced.graph(*traced.inputs), traced.original(*traced.inputs))


def test_when_has_the_last_word() -> None:
    traced = layers(48)
    report = traced.apply(VENDORS)
    assert report["scaled"].matches == ()
    assert set(report["scaled"].reasons) == {"the width 48 is no multiple of 64"}
    assert "scaled: applied at 0 sites" in str(report)
    assert "skipped at 2 sites: the width 48 is no multiple of 64" in str(report)
    traced.check()


def test_when_may_not_decide_by_an_open_size() -> None:
    def few(x: Tensor, weight: Tensor, factor: float) -> str | None:
        return None if x.shape[0] == 4 else "not four rows"

    traced = layers(64)
    report = traced.apply(Rewrite("few", scaled, scaled_otherwise, scaled_samples, few, **DECLARED))
    assert not report["few"].matches
    assert all("`when` depends on a size that is symbolic here" in miss for miss in report["few"].near_misses)
    assert traced.mode.shape_env is not None
    assert not traced.mode.shape_env.replacements


def test_a_when_that_raises() -> None:
    def raises(*arguments: Any) -> str | None:
        raise KeyError("head_dim")

    with pytest.raises(CompileError, match=r"the rewrite odd failed at .*%mul.*KeyError: 'head_dim'"):
        layers(64).apply(Rewrite("odd", scaled, scaled_otherwise, scaled_samples, raises, **DECLARED))


def kept(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return x * weight, x


def flat(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return x.view(-1, 1), weight.view(1, -1)


def halves(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return (x * weight)[:, :32] * factor, (x * weight)[:, 32:] * factor


def views(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    whole = x * weight * factor
    return whole[:, :32], whole[:, 32:]


TABLE = torch.ones(1)
GIVES = "its replacement returns"
A_VIEW = f"{GIVES} an argument, a view of one"
"""Later code could write to the pattern's result or to the argument in place."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "another dtype": (
        rf"{GIVES} float64 \[1, 64\], and its pattern float32 \[1, 64\]",
        {"replacement": lambda x, weight, factor: scaled(x, weight, factor).double()},
    ),
    "another shape": (
        rf"{GIVES} float32 \[64\], and its pattern float32 \[1, 64\]",
        {"replacement": lambda x, weight, factor: scaled(x, weight, factor).sum(0)},
    ),
    "more results": (
        rf"{GIVES} float32 \[1, 64\], float32 \[1, 64\], and its pattern float32 \[1, 64\]",
        {"replacement": lambda x, weight, factor: (x, scaled(x, weight, factor))},
    ),
    "another dtype for one dtype alone": (
        rf"{GIVES} float32 \[1, 64\], and its pattern bfloat16 \[1, 64\]",
        {"replacement": lambda x, weight, factor: scaled(x, weight, factor).float()},
    ),
    "other arguments": ("on its samples, TypeError", {"replacement": lambda x: x}),
    "an unread argument": (
        "does not read its argument weight",
        {"pattern": lambda x, weight, factor: x * factor, "replacement": lambda x, weight, factor: factor * x},
    ),
    "a returned argument": ("its pattern returns its argument x", {"pattern": kept, "replacement": kept}),
    "views alone": ("calls no operation that could be matched", {"pattern": flat, "replacement": flat}),
    "a tensor of its own": ("contains a constant tensor", {"pattern": lambda x, weight, factor: x * weight * TABLE}),
    "an argument as result": (A_VIEW, {"replacement": lambda x, weight, factor: x}),
    "a view of an argument": (A_VIEW, {"replacement": lambda x, weight, factor: x.view(-1, 2).view(x.shape)}),
    "a whole slice": (A_VIEW, {"replacement": lambda x, weight, factor: x[:, :]}),
    "views of one tensor": ("or two views of one tensor", {"pattern": halves, "replacement": views}),
    "no samples": ("it has no samples", {"samples": lambda draw: ()}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    match, changes = REFUSED[name]
    given = {"name": "odd", "pattern": scaled, "replacement": scaled_otherwise, "samples": scaled_samples}
    manager = PassManager(layers(64).graph, layers(64).mode)
    with pytest.raises(CompileError, match=match) as caught:
        manager.add(Rewrite(**given | DECLARED | changes))
    assert "the rewrite odd cannot be used" in str(caught.value)


def test_what_is_no_pass() -> None:
    traced = layers(64)
    with pytest.raises(CompileError, match="is not a pass"):
        traced.apply(3)
    with pytest.raises(CompileError, match="takes no options, but got eps"):
        PassManager(traced.graph, traced.mode).add(VENDORS, eps=1)


def replaced(graph: fx.GraphModule, old: Any, new: Any, limit: int = 10) -> int:
    """A pass as a vendor writes it: it does not set ``meta``."""
    count = 0
    for node in list(graph.graph.nodes):
        if node.target is old and count < limit:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_function(new, node.args))
            graph.graph.erase_node(node)
            count += 1
    return count


def test_a_function_with_options() -> None:
    traced = layers(64)
    manager = PassManager(traced.graph, traced.mode)
    manager.add(replaced, old=aten.sin.default, new=aten.cos.default, limit=1)
    report = manager.add(VENDORS).apply()
    assert report["replaced"].changes == 1
    assert "replaced: applied at 1 sites" in str(report)
    assert len(report["scaled"].matches) == 2
    assert (traced.calls()["sin"], traced.calls()["cos"]) == (1, 1)
    assert all("val" in node.meta for node in traced.graph.graph.nodes if node.op == "call_function")


def test_what_a_function_adds_is_seen_by_rewrites_behind_it() -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x - residual, weight, 1e-6)

    draw = Draw(seed=2)
    traced = trace(function, draw.normal(4, 32), draw.normal(4, 32), draw.normal(32), rows=(0, 1))
    manager = PassManager(traced.graph, traced.mode)
    manager.add(replaced, old=aten.sub.Tensor, new=aten.add.Tensor).add(rewrite_of("add_rms_norm"))
    assert len(manager.apply()["add_rms_norm"].matches) == 1


def test_a_function_that_raises_at_a_node() -> None:
    def fails(graph: fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.target is aten.sin.default:
                raise ValueError("no sine here")

    with pytest.raises(CompileError, match=r"the pass fails failed at %sin .*: ValueError: no sine here"):
        layers(64).apply(fails)


def test_a_function_that_raises_elsewhere() -> None:
    def fails(graph: fx.GraphModule) -> None:
        raise OSError("disk full")

    with pytest.raises(CompileError, match="the pass fails failed: OSError: disk full"):
        layers(64).apply(fails)


def test_a_function_that_leaves_a_broken_graph() -> None:
    def breaks(graph: fx.GraphModule) -> None:
        sines = [node for node in graph.graph.nodes if node.target is aten.sin.default]
        sines[-1].append(sines[0])

    with pytest.raises(CompileError, match="the pass breaks failed"):
        layers(64).apply(breaks)


def test_a_function_that_calls_with_what_does_not_fit() -> None:
    def misfits(graph: fx.GraphModule) -> None:
        (x, weight) = (node for node in graph.graph.nodes if node.op == "placeholder")
        with graph.graph.inserting_after(weight):
            graph.graph.call_function(aten.mm.default, (x, weight))

    with pytest.raises(CompileError, match=r"the pass misfits failed at %mm_default"):
        layers(64).apply(misfits)


def test_expected_counts() -> None:
    traced = layers(48)
    manager = PassManager(traced.graph, traced.mode).add(VENDORS).add(rewrite_of("add_rms_norm"))
    report = manager.apply()
    assert report.below_expected({"scaled": 2, "add_rms_norm": 1}) == [
        "scaled was applied at 0 sites, expected 2: the width 48 is no multiple of 64 (2 times)",
        "add_rms_norm was applied at 0 sites, expected 1: its pattern is not in the graph",
    ]
    assert report.below_expected({"scaled": 0}) == []
    assert report.below_expected({"swish": 1}) == ["swish was applied at 0 sites, expected 1: no such pass ran"]


def test_reports_are_made_of_what_they_always_were() -> None:
    report = Report((PassReport("a", ("mul",), (), 0.5),))
    assert report["a"].matches == ("mul",)
    assert str(report) == "a: applied at 1 sites, 500.0 ms"
