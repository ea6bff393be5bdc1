"""The ``torch.compile`` backend ``hal``, which applies the active backend's passes to the graphs of Dynamo.

A graph is traced again without functionalization, so caches are written in place. hal's operations are recognized in
what a model in plain torch spells out; see :mod:`hal.compile.recognize`. The graph is then rewritten and lowered like a
runner's step. Nothing is captured; only runners capture graphs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from hal.compile.fx.clean import CLEANUPS, common_subexpressions
from hal.compile.fx.make_graph import make_graph
from hal.compile.lower import hoist_preparations, lower
from hal.compile.optimize import PREPARATIONS, chosen_passes, wanted_rewrites
from hal.compile.pass_manager import PassManager
from hal.compile.recognize.recognition import Recognition, needs_gradients
from hal.drivers.backend import Backend, active_backend
from hal.errors import BackendNotActive, CompileError, ConfigError, nearest

log = logging.getLogger("hal.compile")

AddedInputs = Callable[[Sequence[Any]], list[Tensor] | None]
"""A function from a graph's inputs to those that a pass added, or None if the graph cannot run on these."""

OPTIONS = ("compiler", "passes")
INDUCTOR = "inductor"
"""The one value of the option ``compiler``."""


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; ``torch.compile`` calls this for ``backend="hal"``.

    Args:
        module: the graph.
        inputs: example inputs, among which parameters are known. The graph itself carries fake tensors.
        options: ``passes``, as in :class:`hal.CompilationConfig`, and also with the names of what is recognized; and
            ``compiler``, which may be ``inductor``: the result is then compiled with Inductor, for inference only.

    Returns:
        The compiled function. It calls kernels of the active backend, and raises BackendNotActive if another one is
        active.

    Raises:
        BackendNotActive: no backend is open.
        ConfigError: an option is unknown, or the backend does not support code from Inductor.
        CompileError: a pass failed. With Inductor, also: it failed, or the graph writes in place or may need gradients.
    """
    given = dict(options or {})
    for name in given:
        if name not in OPTIONS:
            raise ConfigError(f"the compiler hal has no option {name!r}", nearest(name, OPTIONS))
    active = active_backend()
    if active is None:
        raise BackendNotActive('torch.compile(backend="hal") needs an open backend', "call hal.open() before")
    _check_compiler(given.get("compiler"), active, inputs)
    fakes = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    _read_floats(module)
    compiled = partial(_compiled, module, fakes, _mode_of(module), active, given)
    lowered, added_inputs = compiled(inputs)

    @functools.cache
    def unmerged() -> Callable[..., Any]:
        log.warning(
            "a graph of Dynamo: the weights of merged projections were replaced, so it is compiled again without "
            "merging; to merge the new ones, call torch.compiler.reset()"
        )
        return compiled(())[0]

    def run(*args: Any) -> Any:
        if not active.active:
            active.uses.check_open()
            raise BackendNotActive(
                f"this function was compiled for the backend {active.name}, but another one is active",
                "call activate() of that backend before, or torch.compiler.reset() to compile again",
            )
        added = added_inputs(args)
        token = active.enter()
        try:
            return unmerged()(*args) if added is None else lowered(*args, *added)
        finally:
            active.leave(token)

    return run


def _compiled(
    module: fx.GraphModule,
    fakes: Sequence[Any],
    mode: FakeTensorMode,
    active: Backend,
    options: Mapping[str, Any],
    inputs: Sequence[Any],
) -> tuple[Callable[..., Any], AddedInputs]:
    """Return a graph's function, and one that returns the inputs that it takes behind a call's own.

    Args:
        module: the graph.
        fakes: the fake tensors and symbolic numbers of its inputs.
        mode: the mode of the fake tensors.
        active: the backend to compile for.
        options: those of :func:`backend`.
        inputs: example inputs; without them, no projections are merged.
    """
    passes: Mapping[str, bool] = options.get("passes", {})
    recognition = Recognition(active, inputs, passes)
    others = {name: on for name, on in passes.items() if name not in recognition.names}
    chosen = chosen_passes(active, others)
    graph = make_graph(recognition.traced(module), fakes, mode)
    manager = PassManager(graph, mode)
    for each in (*PREPARATIONS, *recognition.passes, *chosen, *CLEANUPS):
        manager.add(each)
    report = manager.apply()
    report = attrs.evolve(report, passes=(*recognition.reports, *report.passes))
    log.info("optimized a graph of Dynamo:\n%s", report)
    asked = {name for name, on in passes.items() if on and name in recognition.names}
    for warning in report.missed(wanted_rewrites(active, others) | asked):
        log.warning("a graph of Dynamo: %s", warning)
    if options.get("compiler") is not None:
        from hal.compile.inductor_backend import compile_graph  # imports Inductor, which takes a second

        # Weights are not in the driver's own form here, so Inductor multiplies by them itself.
        lowered = compile_graph(graph, mode, {*(active.inductor or ())} - {"linear"})
    else:
        if hoist_preparations(graph.graph, active, mode):
            common_subexpressions(graph)
        lowered = lower(graph.graph)
    return lowered, recognition.finish()


def _mode_of(module: fx.GraphModule) -> FakeTensorMode:
    """Return the mode of a graph's fake tensors, which need not be inputs, or Dynamo's if it has none."""
    values = tree_leaves([node.meta.get("example_value") for node in module.graph.nodes])
    found = next((each.fake_mode for each in values if isinstance(each, FakeTensor)), None)
    return found or detect_fake_mode()  # type: ignore[return-value]


def _check_compiler(compiler: Any, active: Backend, inputs: Sequence[Any]) -> None:
    """Raise ConfigError or CompileError unless the option ``compiler`` is left out or can be served."""
    if compiler is None:
        return
    if compiler != INDUCTOR:
        raise ConfigError(f"the option compiler is {compiler!r:.70}", f'set it to "{INDUCTOR}", or leave it out')
    if active.inductor is None:
        raise ConfigError(f"the backend {active.name} does not support code from Inductor", "leave compiler out")
    if needs_gradients(inputs):
        raise CompileError(
            "a parameter requires grad, and hal's graphs compiled with Inductor are for inference",
            "call the model under torch.inference_mode() or torch.no_grad()",
        )


def _read_floats(module: fx.GraphModule) -> None:
    """Write numbers such as a norm's epsilon, which are symbolic with ``dynamic=True``, as constants.

    Reading them makes Dynamo guard them: another number compiles again.
    """
    found = {
        node: float(node.meta["example_value"])
        for node in module.graph.nodes
        if isinstance(node.meta.get("example_value"), torch.SymFloat)
    }
    for node in found:
        for user in list(node.users):
            args, kwargs = fx.map_arg((user.args, user.kwargs), lambda each: found.get(each, each))
            user.args, user.kwargs = args, kwargs
    if found:
        module.recompile()
