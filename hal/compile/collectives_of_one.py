"""Removal of collectives over groups of one rank, such as a call by hand in a model that no ranks split."""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from hal import ops
from hal.compile.collective_calls import GROUP
from hal.compile.fx.clean import needless_copies
from hal.compile.fx.symbolic_sizes import value
from hal.compile.rewrite.pattern import copy_calls, trace_function
from hal.compile.rewrite.rewrite import of_operation
from hal.device.group import group
from hal.ops.declaration.operation import Operation
from hal.ops.declaration.torch_library import without_aliases


def collectives_of_one(graph: fx.GraphModule) -> int:
    """Replace each collective over a group of one rank by its body, mostly a copy, and remove needless copies.

    A fused collective becomes the smaller operations without their collectives.

    Returns:
        The number of collectives replaced.
    """
    count = 0
    left = list(graph.graph.nodes)
    while left:
        node = left.pop()
        operation = ops.operation_of_node(node.target)
        if operation is None or not operation.collective:
            continue
        arguments = operation.node_arguments(node.args, node.kwargs)
        if group(arguments[GROUP]).size == 1:
            left += _inline(graph.graph, node, operation, list(arguments.values()))
            count += 1
    if count:
        needless_copies(graph)
    return count


def _inline(graph: fx.Graph, node: fx.Node, operation: Operation, arguments: list[Any]) -> list[fx.Node]:
    """Replace a node by the nodes of the operation's body, and return these."""
    values = [value(each) for each in arguments]

    pattern = of_operation(operation).pattern if operation.fused else operation.pattern

    def body(*given: Any) -> Any:
        result = pattern(*given)
        return without_aliases(result, [each for each in given if isinstance(each, Tensor)])

    tensor: Any = next(each for each in values if isinstance(each, Tensor))
    traced = trace_function(body, values, tensor.fake_mode).graph
    with graph.inserting_before(node):
        made, results = copy_calls(traced, graph, [each for each in arguments if isinstance(value(each), Tensor)])
    if isinstance(value(node), Tensor):
        node.replace_all_uses_with(results[0])
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
    return made
