"""Bringing arguments into the form that a kernel computes on, once for all calls that share them."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hal import ops
from hal.backend import Backend
from hal.compile.normalise import value
from hal.ops.preparing import PreparingKernel


def hoist_preparations(graph: fx.Graph, backend: Backend, mode: FakeTensorMode, *, keep: Collection[str] = ()) -> int:
    """Write out what each :class:`hal.ops.preparing.PreparingKernel` does to its arguments; returns to how many it did.

    The nodes of those operations then call the kernel behind the preparation. What is prepared several times from the
    same tensor is left to :func:`hal.compile.clean.common_subexpressions`.

    Args:
        graph: of a rewritten step.
        backend: whose kernels they are.
        mode: whose fake tensors the nodes carry.
        keep: names of operations whose nodes stay as they are.
    """
    count = 0
    for node in list(graph.nodes):
        operation = ops.operation_of_node(node.target) if node.op == "call_function" else None
        kernel = None if operation is None else backend.kernels.get(operation.name)
        if operation is None or operation.name in keep or not isinstance(kernel, PreparingKernel):
            continue
        arguments = list(operation.arguments(node.args, node.kwargs).values())
        for place, prepare in kernel.places:
            with mode:
                traced = make_fx(prepare, _allow_non_fake_inputs=True)(value(arguments[place])).graph
            (source,) = (each for each in traced.nodes if each.op == "placeholder")
            with graph.inserting_before(node):
                result = graph.graph_copy(traced, {source: arguments[place]})
            assert isinstance(result, fx.Node)
            arguments[place] = result
            count += 1
        node.target, node.args, node.kwargs = kernel.kernel, tuple(arguments), {}
    return count
