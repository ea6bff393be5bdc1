"""The pass manager, which applies rewrites and functions to a traced graph in order and reports on each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.fx.alias_analysis import PURE
from hal.compile.fx.normalize import normalize
from hal.compile.rewrite.apply_rewrite import RewriteApplication
from hal.compile.rewrite.rewrite import Rewrite, prepare
from hal.compile.rewrite_report import PassReport, Report
from hal.errors import CompileError

__all__ = ["Pass", "PassManager", "PassReport", "Report"]

Pass = Callable[..., Any]


class PassManager:
    """Applies passes to a graph.

    Args:
        graph: a graph of overloads, with fake tensors as ``meta["val"]``; changed in place.
        mode: the mode of the fake tensors.
    """

    def __init__(self, graph: fx.GraphModule, mode: FakeTensorMode) -> None:
        self._graph, self._mode = graph, mode
        self._passes: list[Callable[[], PassReport]] = []

    def add(self, which: Rewrite | Pass, **options: Any) -> PassManager:
        """Add a rewrite, or a function of a GraphModule, which is called with ``options``. Return this manager.

        A function may return its number of changes. Nodes that it adds need no fake tensors.

        Raises:
            CompileError: ``which`` is neither, a rewrite was given options, the sides of a rewrite differ in shapes or
                dtypes on its samples, or its pattern cannot be matched.
        """
        if isinstance(which, Rewrite):
            if options:
                raise CompileError(
                    f"the rewrite {which.name} takes no options, but got {', '.join(options)}", "leave them out"
                )
            prepare(which)
            self._passes.append(lambda: self._rewrite(which))
        elif callable(which):
            name = getattr(which, "__name__", repr(which))
            self._passes.append(lambda: self._call(name, which, options))
        else:
            raise CompileError(f"{which!r} is not a pass", "give a Rewrite, or a function of a GraphModule")
        return self

    def apply(self) -> Report:
        """Apply all passes.

        Raises:
            CompileError: a pass raised, or a replacement returns other shapes or dtypes than its pattern.
        """
        normalize(self._graph.graph)
        reports = tuple(run() for run in self._passes)
        self._graph.graph.lint()
        self._graph.recompile()
        return Report(reports)

    def _rewrite(self, which: Rewrite) -> PassReport:
        report = RewriteApplication(which, self._graph, self._mode).run()
        if report.matches and not isinstance(which.replacement, torch._ops.OpOverload):
            normalize(self._graph.graph)  # A function may reshape its arguments, as those of the next pattern.
        return report

    def _call(self, name: str, function: Pass, options: dict[str, Any]) -> PassReport:
        start = time.perf_counter()
        try:
            result = function(self._graph, **options)
            self._graph.graph.lint()
            _fill_in(self._graph.graph, self._mode)
        except Exception as error:
            node = _node_of(error)
            at = f" at {node.format_node() or node.name}" if node is not None else ""
            raise CompileError(
                f"the pass {name} failed{at}: {type(error).__name__}: {error}", "correct the pass, or leave it out"
            ) from error
        normalize(self._graph.graph)
        changes = result if type(result) is int else None
        return PassReport(name, (), (), time.perf_counter() - start, changes=changes)


def _fill_in(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Add fake tensors to nodes that a function inserted without them."""
    for node in graph.nodes:
        if "val" in node.meta or not (isinstance(node.target, torch._ops.OpOverload) or node.target in PURE):
            continue
        if any("val" not in read.meta for read in node.all_input_nodes):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
        with torch.inference_mode(False), torch.no_grad(), mode:
            node.meta["val"] = node.target(*args, **kwargs)


def _node_of(error: BaseException) -> fx.Node | None:
    """Return the node at which a function failed: the value of a variable ``node`` in its innermost frame."""
    found, trace = None, error.__traceback__
    while trace is not None:
        held = trace.tb_frame.f_locals.get("node")
        if isinstance(held, fx.Node) and "/torch/fx/" not in trace.tb_frame.f_code.co_filename:
            found = held
        trace = trace.tb_next
    return found
