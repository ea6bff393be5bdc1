"""From a traced step to the step that runs: the backend's rewrites, clean-up, and a function that calls its kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from hal import ops
from hal.compile.fx.clean import CLEANUPS, common_subexpressions
from hal.compile.lower import hoist_preparations, lower, source_of
from hal.compile.pass_manager import PassManager, Report
from hal.compile.rewrite.rewrite import Rewrite, fusions
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.drivers.backend import Backend
from hal.drivers.compiler_registry import pass_name
from hal.errors import ConfigError, nearest
from hal.nn import CausalLM
from hal.step.state import StateMemory

log = logging.getLogger("hal.compile")


@attrs.frozen
class Stage:
    """A graph as it left a stage of compiling.

    Attributes:
        name: ``trace``, ``rewrite`` or ``lower``.
        seconds: that the stage took.
        nodes: calls in the graph.
        code: the graph as readable code.
    """

    name: str
    seconds: float
    nodes: int
    code: str


@attrs.frozen
class OptimisedStep:
    """A step that was rewritten for a backend and not lowered yet.

    Attributes:
        traced: its graph has the rewrites in it.
        report: what each pass did.
        stages: the graph's way so far.
    """

    traced: TracedStep
    report: Report
    stages: tuple[Stage, ...]

    def hoist(self, backend: Backend, keep: Collection[str] = ()) -> None:
        """Prepare arguments of kernels once; see :func:`hoist_preparations`."""
        graph = self.traced.graph
        if hoist_preparations(graph.graph, backend, self.traced.mode, keep=keep):
            common_subexpressions(graph)

    def lowered(self) -> Callable[..., tuple[Tensor]]:
        """From the tensors of a batch, in the order of its fields, to ``(logits,)``. Takes the graph over."""
        inputs = [node for node in self.traced.graph.graph.nodes if node.op == "placeholder"]
        fixed = self.traced.fixed
        return lower(self.traced.graph.graph, dict(zip(inputs[len(inputs) - len(fixed) :], fixed, strict=True)))


def kept_whole(backend: Backend) -> frozenset[str]:
    """Names of the operations that a trace for a backend keeps as nodes: of the fused ones those that it can run."""
    return frozenset(
        each.name for each in ops.catalogue().values() if not each.fused or each.name in backend.kernels
    )  # fmt: skip


def optimise_model(
    model: CausalLM, states: StateMemory, sizes: StepSizes, backend: Backend, passes: Mapping[str, bool]
) -> OptimisedStep:
    """Trace a model's step, and rewrite it for a backend; see :func:`optimise`.

    Warns of what :meth:`hal.compile.rewrite_report.Report.missed` tells: somebody expects what those rewrites bring.

    Args:
        model: loaded on the backend.
        states: that the step writes.
        sizes: to trace for.
        backend: whose rewrites are applied.
        passes: by name, which of them to leave out (False), and which of the rewrites are wanted (True).
    """
    trace = partial(trace_step, model, states, sizes, whole=kept_whole(backend), decompose=False)
    step = optimise(trace, backend, passes)
    log.info("optimised a step of %s:\n%s", type(model).__name__, step.report)
    for warning in step.report.missed(wanted_rewrites(backend, passes)):
        log.warning("%s: %s", type(model).__name__, warning)
    return step


def optimise(trace: Callable[[], TracedStep], backend: Backend, passes: Mapping[str, bool]) -> OptimisedStep:
    """Trace a step and rewrite it for a backend.

    Args:
        trace: makes the traced step.
        backend: whose rewrites are applied.
        passes: by name, which of them to leave out (False); all others run.

    Raises:
        CompileError: the step cannot be traced, or a pass failed.
        ConfigError: a pass is unknown.
    """
    chosen = chosen_passes(backend, passes)
    began = time.perf_counter()
    traced = trace()
    stages = [stage_of("trace", traced, began)]
    began = time.perf_counter()
    manager = PassManager(traced.graph, traced.mode)
    for each in (*chosen, *CLEANUPS):
        manager.add(each)
    report = manager.apply()
    return OptimisedStep(traced, report, (*stages, stage_of("rewrite", traced, began)))


def all_passes(backend: Backend) -> Sequence[Rewrite | Callable[..., Any]]:
    """What a backend's graphs are rewritten with: its own rewrites, then those of the fused operations that it has.

    One of its own that is named after a fused operation takes the place of that operation's.
    """
    own = set(map(pass_name, backend.rewrites))
    return (*backend.rewrites, *(each for each in fusions(backend) if each.name not in own))


def chosen_passes(backend: Backend, passes: Mapping[str, bool]) -> list[Rewrite | Callable[..., Any]]:
    """All of them but those that ``passes`` turns off.

    Raises:
        ConfigError: ``passes`` names one that there is not.
    """
    known = {pass_name(each): each for each in all_passes(backend)}
    for name in passes:
        if name not in known:
            raise ConfigError(f"the backend {backend.name} has no pass {name!r}", nearest(name, known))
    return [each for name, each in known.items() if passes.get(name, True)]


def wanted_rewrites(backend: Backend, passes: Mapping[str, bool]) -> set[str]:
    """Names of the rewrites, not of functions, that ``passes`` asks for."""
    return {each.name for each in all_passes(backend) if isinstance(each, Rewrite) and passes.get(each.name, False)}


def stage_of(name: str, traced: TracedStep, began: float) -> Stage:
    """A stage that ends now, and began at ``began`` of :func:`time.perf_counter`."""
    seconds = time.perf_counter() - began
    graph = traced.graph.graph
    calls = sum(node.op == "call_function" for node in graph.nodes)
    return Stage(name, seconds, calls, source_of(graph))
