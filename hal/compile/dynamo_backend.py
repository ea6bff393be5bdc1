"""The ``torch.compile`` backend ``hal``, which applies the active backend's passes to the graphs of Dynamo.

A graph is traced again without functionalization, so caches are written in place. hal's operations are recognized in
what a model in plain torch spells out; see :mod:`hal.compile.recognize`. The graph is then rewritten and lowered like a
runner's step. Nothing is captured; only runners capture graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from hal.compile.fx.clean import CLEANUPS, common_subexpressions
from hal.compile.fx.make_graph import make_graph
from hal.compile.lower import hoist_preparations, lower
from hal.compile.optimize import PREPARATIONS, chosen_passes, wanted_rewrites
from hal.compile.pass_manager import PassManager
from hal.compile.recognize.recognition import Recognition, needs_gradients
from hal.drivers.backend import Backend, active_backend
from hal.errors import BackendNotActive, CompileError, ConfigError, nearest

log = logging.getLogger("hal.compile")

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
        CompileError: a pass failed, or the graph has no tensors. With Inductor, also: it failed, or the graph writes in
            place or may need gradients.
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
    mode = next((each.fake_mode for each in fakes if isinstance(each, FakeTensor)), None)
    if mode is None:
        raise CompileError("Dynamo passed a graph without tensors", "exclude that function from torch.compile")
    _read_floats(module)
    passes: Mapping[str, bool] = given.get("passes", {})
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
    added_inputs = recognition.finish()
    if given.get("compiler") is not None:
        from hal.compile.inductor_backend import compile_graph  # imports Inductor, which takes a second

        # Weights are not in the driver's own form here, so Inductor multiplies by them itself.
        lowered = compile_graph(graph, mode, {*(active.inductor or ())} - {"linear"})
    else:
        if hoist_preparations(graph.graph, active, mode):
            common_subexpressions(graph)
        lowered = lower(graph.graph)

    def run(*args: Any) -> Any:
        if not active.active:
            active.uses.check_open()
            raise BackendNotActive(
                f"this function was compiled for the backend {active.name}, but another one is active",
                "call activate() of that backend before, or torch.compiler.reset() to compile again",
            )
        return lowered(*args, *added_inputs(args))

    return run


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
