"""Bringing arguments into the form that a kernel computes on, once for all calls that share them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal import ops
from hal.compile.fx.make_graph import make_graph
from hal.compile.fx.normalise import value
from hal.drivers.backend import Backend
from hal.ops.kernels.prepared_arguments import PreparingKernel


def hoist_preparations(graph: fx.Graph, backend: Backend, mode: FakeTensorMode, *, keep: Collection[str] = ()) -> int:
    """Write out what each :class:`~hal.ops.kernels.prepared_arguments.PreparingKernel` does to its arguments.

    The nodes of those operations then call the kernel behind the preparation. What is prepared several times from the
    same tensor is left to :func:`hal.compile.fx.clean.common_subexpressions`.

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
            traced = make_graph(prepare, [value(arguments[place])], mode)
            (source,) = (each for each in traced.graph.nodes if each.op == "placeholder")
            with graph.inserting_before(node):
                known = {source: arguments[place], **_constants(traced, graph)}
                result = graph.graph_copy(traced.graph, known)
            assert isinstance(result, fx.Node)
            arguments[place] = result
            count += 1
        names = enumerate(operation.signature.parameters)
        node.meta["written"] = tuple(place for place, name in names if name in operation.mutates)
        node.target, node.args, node.kwargs = kernel.kernel, tuple(arguments), {}
    return count


def _constants(traced: fx.GraphModule, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The tensors that a preparation holds, as attributes of the graph's module: one for all that hold the same."""
    owner: Any = graph.owning_module
    names = {id(tensor): name for name, tensor in owner.named_buffers()}
    places = {}
    for node in traced.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = operator.attrgetter(node.target)(traced)
        name = names.get(id(tensor))
        if name is None:
            name = next(each for index in itertools.count() if not hasattr(owner, each := f"prepared_by_{index}"))
            owner.register_buffer(name, tensor, persistent=False)
        places[node] = graph.get_attr(name)
        places[node].meta = dict(node.meta)
    return places
