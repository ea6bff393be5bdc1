"""Cases of rewrites: each rewrite is proved, and no graph computes other results after the backend's passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from hal import ops
from hal.ops.declaration.operation import Operation
from hal.ops.tolerance import assert_agree
from hal.testing.case import Case, Failure, NotApplicable
from hal.testing.operation_calls import Call, describe, largest_sample, tensors
from hal.testing.target import Target, dtype_name

if TYPE_CHECKING:
    from hal.compile.rewrite.rewrite import Rewrite


def cases(target: Target) -> Iterator[Case]:
    """Yield ``rewrites/<rewrite>/proof`` and ``rewrites/<fused operation>/<dtype>/...``."""
    backend = target.backend
    for rewrite in backend.rewrites:
        if hasattr(rewrite, "pattern"):  # a function of a graph has no pattern to compare
            yield Case(f"rewrites/{rewrite.name}/proof", partial(_proof, target, rewrite))
    for operation in ops.catalogue().values():
        if operation.fused and operation.name in backend.kernels:
            yield Case(f"rewrites/{operation.name}/proof", partial(_proof, target, operation))
        if operation.fused:
            for dtype in backend.limits.dtypes:
                name = f"rewrites/{operation.name}/{dtype_name(dtype)}"
                yield Case(f"{name}/alone", partial(_alone, target, operation, dtype))
                yield Case(f"{name}/another-reader", partial(_another_reader, target, operation, dtype))


# hal.compile is imported lazily: it takes a second, and pytest collects all cases even if it runs only a few.


def _proof(target: Target, rewrite: Rewrite | Operation) -> None:
    from hal.compile.rewrite.proof import check_rewrite
    from hal.compile.rewrite.rewrite import of_operation

    proved = of_operation(rewrite) if isinstance(rewrite, Operation) else rewrite
    check_rewrite(proved, target.backend.limits.dtypes)


def _alone(target: Target, operation: Operation, dtype: torch.dtype) -> None:
    """Check the pattern alone."""
    _compare(target, operation, dtype, None)


def _another_reader(target: Target, operation: Operation, dtype: torch.dtype) -> None:
    """Check the pattern with another reader of one intermediate, for each intermediate in turn."""
    number = 0
    while _compare(target, operation, dtype, number):
        number += 1
    if number == 0:
        raise NotApplicable(f"{operation.name} has no intermediate")


def _compare(target: Target, operation: Operation, dtype: torch.dtype, reader: int | None) -> bool:
    """Compare results with and without the backend's passes.

    Args:
        reader: index of the intermediate that gets another reader; None for no other reader.

    Returns:
        False if ``reader`` exceeds the number of intermediates.
    """
    from hal.compile.fx.clean import CLEANUPS
    from hal.compile.optimize import all_passes
    from hal.compile.pass_manager import PassManager
    from hal.compile.rewrite.proof import trace_alone
    from hal.compile.rewrite.rewrite import of_operation

    backend = target.activated()
    target.require_canonical(operation)
    call = Call(operation, dtype, largest_sample(operation), "rewrite")
    given, wanted = call.arguments(backend.device.torch), call.arguments("cpu")
    shown = describe(operation, wanted)
    alone = of_operation(operation), operation.node_form.unpack(tuple(given))
    (plain, _), (changed, mode) = (trace_alone(*alone) for _ in range(2))
    where = "alone"
    if reader is not None:
        places = _intermediates(plain.graph)
        if reader >= len(places):
            return False
        where = f"with another reader of {places[reader]}"
        for graph in (plain, changed):
            _read(graph, _intermediates(graph.graph)[reader])
    manager = PassManager(changed, mode)
    for each in (*all_passes(backend), *CLEANUPS):
        manager.add(each)
    manager.apply()
    with torch.inference_mode():
        found = changed(*tensors(given))
        backend.device.synchronize()
        with ops.intercepted(lambda each, _: each.reference):
            expected = plain(*tensors(wanted))
    try:
        assert_agree(operation, dtype, [tensors(found), tensors(given)], [tensors(expected), tensors(wanted)], where)
    except AssertionError as error:
        passes = ", ".join(backend.pass_names) or "none"
        problem = f"{' '.join(str(error).split())}; passes: {passes}"
        problem = f"the results of the graph {where} differ after the passes: {problem}"
        raise Failure([problem], operation.name, *shown) from None
    return True


def _intermediates(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute a tensor that is not a result."""
    (returned,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    results = [returned] if isinstance(returned, fx.Node) else list(returned or ())
    inside = {source for each in results for source in each.all_input_nodes} | set(results)
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and node not in results
        and isinstance(node.meta.get("val"), Tensor)
        and (node not in inside or node.users.keys() - set(results))
    ]


def _read(module: fx.GraphModule, node: fx.Node) -> None:
    """Add a copy of the result of ``node`` to the graph's results."""
    output = next(each for each in reversed(module.graph.nodes) if each.op == "output")
    (returned,) = output.args
    results = [returned] if isinstance(returned, fx.Node) else list(returned or ())
    with module.graph.inserting_before(output):
        copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
    output.args = ((*results, copy),)
    module.recompile()
