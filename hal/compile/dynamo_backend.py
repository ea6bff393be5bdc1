"""The ``torch.compile`` backend ``hal``, which applies the active backend's passes to the graphs of Dynamo.

A graph is traced again without functionalization, so caches are written in place. It is then rewritten and lowered like
a runner's step. Nothing is captured; only runners capture graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from hal.compile.fx.clean import CLEANUPS, common_subexpressions
from hal.compile.fx.make_graph import make_graph
from hal.compile.lower import hoist_preparations, lower
from hal.compile.optimize import PREPARATIONS, chosen_passes, wanted_rewrites
from hal.compile.pass_manager import PassManager
from hal.drivers.backend import active_backend
from hal.errors import BackendNotActive, CompileError, ConfigError, nearest

log = logging.getLogger("hal.compile")

OPTIONS = ("passes",)


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; ``torch.compile`` calls this for ``backend="hal"``.

    Args:
        module: the graph.
        inputs: example inputs. Unused, because the graph carries fake tensors.
        options: ``passes``, as in :class:`hal.CompilationConfig`.

    Returns:
        The compiled function. It calls kernels of the active backend, and raises BackendNotActive if another one is
        active.

    Raises:
        BackendNotActive: no backend is open.
        ConfigError: an option is unknown.
        CompileError: a pass failed, or the graph has no tensors.
    """
    given = dict(options or {})
    for name in given:
        if name not in OPTIONS:
            raise ConfigError(f"the compiler hal has no option {name!r}", nearest(name, OPTIONS))
    active = active_backend()
    if active is None:
        raise BackendNotActive('torch.compile(backend="hal") needs an open backend', "call hal.open() before")
    fakes = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    mode = next((each.fake_mode for each in fakes if isinstance(each, FakeTensor)), None)
    if mode is None:
        raise CompileError("Dynamo passed a graph without tensors", "exclude that function from torch.compile")
    graph = make_graph(module, fakes, mode)
    manager = PassManager(graph, mode)
    for each in (*PREPARATIONS, *chosen_passes(active, given.get("passes", {})), *CLEANUPS):
        manager.add(each)
    report = manager.apply()
    log.info("optimized a graph of Dynamo:\n%s", report)
    for warning in report.missed(wanted_rewrites(active, given.get("passes", {}))):
        log.warning("a graph of Dynamo: %s", warning)
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
        return lowered(*args)

    return run
