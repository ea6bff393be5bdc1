"""The stages of compiling a step: trace, rewrites, clean-up, and lowering."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from torch import fx

from hal import ops
from hal.compile.collective_calls import called, collectives_of_one
from hal.compile.fx.clean import CLEANUPS, common_subexpressions
from hal.compile.fx.symbolic_sizes import value
from hal.compile.lower import hoist_preparations, lower, source_of
from hal.compile.pass_manager import PassManager, Report
from hal.compile.recognize.recognition import recognition_passes
from hal.compile.rewrite.rewrite import Rewrite, fusions
from hal.compile.trace import StepSizes, TracedStep, trace_step
from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs, pass_name
from hal.errors import ConfigError, nearest
from hal.nn import CausalLM
from hal.ops.kernels.partial_kernel import FormKernels, PartialKernel
from hal.step.rows import NONE, Rows
from hal.step.state import StateMemory

PREPARATIONS = (collectives_of_one,)
"""Functions that run before the rewrites."""

log = logging.getLogger("hal.compile")


@attrs.frozen
class Stage:
    """A graph after one stage of compilation.

    Attributes:
        name: ``trace``, ``rewrite`` or ``lower``.
        seconds: the duration of the stage.
        nodes: the number of calls in the graph.
        code: the graph's code.
    """

    name: str
    seconds: float
    nodes: int
    code: str


def unsupported_options(graph: fx.Graph, backend: Backend) -> Counter[tuple[str, tuple[str, ...]]]:
    """Return the calls that a :class:`~hal.vendor.PartialKernel` of the backend does not support.

    Returns:
        The number of calls, by the operation's name and what its kernel lacks: options, else what it composes itself.
    """
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for node, operation in called(graph):
        kernel = backend.kernels.get(operation.name)
        if isinstance(kernel, PartialKernel | FormKernels):
            given = operation.node_form.signature.bind(*node.args, **node.kwargs)
            given.apply_defaults()
            lacks = kernel.unsupported(given.arguments)
            if not lacks and isinstance(kernel, PartialKernel) and kernel.composes is not None:
                lacks = kernel.composes(*map(value, operation.node_arguments(node.args, node.kwargs).values()))
            if lacks:
                found[operation.name, lacks] += 1
    return found


@attrs.frozen
class OptimizedStep:
    """A step that is rewritten for a backend, but not lowered.

    Attributes:
        traced: the step, with its graph rewritten.
        report: the report of the passes.
        stages: the stages so far.
        unsupported: see :func:`unsupported_options`.
        recognized: the names of the passes that recognized operations, whose skipped sites are no surprise.
    """

    traced: TracedStep
    report: Report
    stages: tuple[Stage, ...]
    unsupported: Mapping[tuple[str, tuple[str, ...]], int]
    recognized: frozenset[str] = frozenset()

    def hoist(self, backend: Backend, keep: Collection[str] = ()) -> None:
        """Prepare kernel arguments once; see :func:`hoist_preparations`."""
        graph = self.traced.graph
        if hoist_preparations(graph.graph, backend, self.traced.mode, keep=keep):
            common_subexpressions(graph)

    def lowered(self) -> Callable[..., Outputs]:
        """Return a function from a batch's tensors, in field order, to what the step returns. Consumes the graph."""
        inputs = [node for node in self.traced.graph.graph.nodes if node.op == "placeholder"]
        fixed = self.traced.fixed
        return lower(self.traced.graph.graph, dict(zip(inputs[len(inputs) - len(fixed) :], fixed, strict=True)))

    def for_any_size(self, module: object, backend: Backend) -> Callable[..., Outputs]:
        """Return :meth:`lowered` with prepared arguments, for steps of any size.

        Raises:
            CompileError: the trace holds for some sizes only.
        """
        self.traced.check_any_size(module)
        self.hoist(backend)
        return self.lowered()


def kept_whole(backend: Backend) -> frozenset[str]:
    """Return the operations that a trace keeps as nodes: a fused operation only if the backend has a kernel for it."""
    return frozenset(each.name for each in ops.catalogue().values() if not each.fused or each.name in backend.kernels)


def optimize_model(
    model: CausalLM,
    states: StateMemory,
    sizes: StepSizes,
    backend: Backend,
    passes: Mapping[str, bool],
    rows: Rows = NONE,
) -> OptimizedStep:
    """Trace a model's step and rewrite it for a backend; see :func:`optimize`.

    Logs the warnings of :meth:`hal.compile.rewrite_report.Report.missed`.

    Args:
        model: loaded on the backend.
        states: the states that the step writes.
        sizes: the sizes to trace for.
        backend: supplies the passes.
        passes: by name, False disables a pass, True warns if a rewrite is applied nowhere.
        rows: the rows of logits that the step computes, too.
    """
    trace = partial(trace_step, model, states, sizes, whole=kept_whole(backend), decompose=False, rows=rows)
    step = optimize(trace, backend, passes)
    log.info("optimized a step of %s:\n%s", type(model).__name__, step.report)
    expected = attrs.evolve(
        step.report, passes=tuple(each for each in step.report.passes if each.name not in step.recognized)
    )
    for warning in expected.missed(wanted_rewrites(backend, passes)):
        log.warning("%s: %s", type(model).__name__, warning)
    return step


def optimize(trace: Callable[[], TracedStep], backend: Backend, passes: Mapping[str, bool]) -> OptimizedStep:
    """Trace a step and rewrite it for a backend.

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
    recognition = recognition_passes(backend) if traced.recognize else ()
    for each in (*PREPARATIONS, *recognition, *chosen, *CLEANUPS):
        manager.add(each)
    report = manager.apply()
    stages.append(stage_of("rewrite", traced, began))
    unsupported = unsupported_options(traced.graph.graph, backend)
    return OptimizedStep(traced, report, tuple(stages), unsupported, frozenset(map(pass_name, recognition)))


def all_passes(backend: Backend) -> Sequence[Rewrite | Callable[..., Any]]:
    """Return a backend's passes: its own, then a rewrite for each fused operation that it has a kernel for.

    A pass of the backend with the name of a fused operation replaces that operation's rewrite.
    """
    own = set(map(pass_name, backend.rewrites))
    return (*backend.rewrites, *(each for each in fusions(backend) if each.name not in own))


def chosen_passes(backend: Backend, passes: Mapping[str, bool]) -> list[Rewrite | Callable[..., Any]]:
    """Return all passes except those that ``passes`` disables.

    Raises:
        ConfigError: ``passes`` has an unknown name.
    """
    known = {pass_name(each): each for each in all_passes(backend)}
    for name in passes:
        if name not in known:
            raise ConfigError(f"the backend {backend.name} has no pass {name!r}", nearest(name, known))
    return [each for name, each in known.items() if passes.get(name, True)]


def wanted_rewrites(backend: Backend, passes: Mapping[str, bool]) -> set[str]:
    """Return the names of the rewrites, not functions, that ``passes`` enables explicitly."""
    return {each.name for each in all_passes(backend) if isinstance(each, Rewrite) and passes.get(each.name, False)}


def stage_of(name: str, traced: TracedStep, began: float) -> Stage:
    """Return the stage from ``began``, a value of :func:`time.perf_counter`, until now."""
    seconds = time.perf_counter() - began
    graph = traced.graph.graph
    calls = sum(node.op == "call_function" for node in graph.nodes)
    return Stage(name, seconds, calls, source_of(graph))
