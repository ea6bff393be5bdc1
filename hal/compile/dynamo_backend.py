"""``torch.compile(model, backend="hal")``: the graphs that Dynamo makes, through the active backend's passes.

What Dynamo hands over is traced once more, as it stands: mutations stay where they are, so a cache is written in place.
Then it is rewritten and lowered as a runner's steps are. Nothing is captured; that is for runners.
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
from hal.compile.optimise import chosen_passes, wanted_rewrites
from hal.compile.pass_manager import PassManager
from hal.drivers.backend import active_backend
from hal.errors import BackendNotActive, CompileError, ConfigError, nearest

log = logging.getLogger("hal.compile")

OPTIONS = ("passes",)


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The compiler that ``torch.compile`` knows as ``hal``.

    Args:
        module: from Dynamo.
        inputs: examples of its inputs; what Dynamo knows of them counts.
        options: ``passes``, as in :class:`hal.CompilationConfig`.

    Returns:
        The compiled function. It has the active backend's kernels in it, so it raises BackendNotActive when another one
        is active.

    Raises:
        BackendNotActive: no backend is open.
        ConfigError: an option is unknown.
        CompileError: a pass failed.
    """
    given = dict(options or {})
    for name in given:
        if name not in OPTIONS:
            raise ConfigError(f"the compiler hal has no option {name!r}", nearest(name, OPTIONS))
    active = active_backend()
    if active is None:
        raise BackendNotActive("torch.compile was asked for hal, and no backend is open", "call hal.open() before")
    fakes = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    mode = next((each.fake_mode for each in fakes if isinstance(each, FakeTensor)), None)
    if mode is None:
        raise CompileError("Dynamo handed over a graph without tensors", "leave that function out of torch.compile")
    graph = make_graph(module, fakes, mode)
    manager = PassManager(graph, mode)
    for each in (*chosen_passes(active, given.get("passes", {})), *CLEANUPS):
        manager.add(each)
    report = manager.apply()
    log.info("optimised a graph of Dynamo's:\n%s", report)
    for warning in report.missed(wanted_rewrites(active, given.get("passes", {}))):
        log.warning("a graph of Dynamo's: %s", warning)
    if hoist_preparations(graph.graph, active, mode):
        common_subexpressions(graph)
    lowered = lower(graph.graph)

    def run(*args: Any) -> Any:
        if not active.active:
            active.uses.check_open()
            raise BackendNotActive(
                f"this function was compiled for the backend {active.name}, and another one is active",
                "call activate() of that backend before, or torch.compiler.reset() to compile anew",
            )
        return lowered(*args)

    return run
