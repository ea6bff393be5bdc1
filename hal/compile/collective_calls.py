"""The collectives of a traced step: whose results they join, the bytes that ranks exchange, and those of one rank."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.clean import needless_copies
from hal.compile.fx.symbolic_sizes import value
from hal.compile.rewrite.pattern import copy_calls, trace_function
from hal.compile.rewrite.rewrite import of_operation
from hal.compile.trace import TracedStep
from hal.device.group import group
from hal.nn import CausalLM
from hal.ops import Operation
from hal.ops.declaration.torch_library import without_aliases

GROUP = "group"
"""The argument with which a collective takes the name of its group."""
ROUTED = ("expert_dispatch", "expert_combine")
"""Collectives that send a row only to the ranks of its experts."""


@attrs.frozen
class CollectiveCall:
    """A collective in a step of one rank.

    Attributes:
        operation: its name.
        of: the path of the layer whose results it joins or sends, such as ``model.layers.0.mlp.down_proj``.
        group: the name of its group.
        ranks: the number of ranks.
        elements: elements of its argument, or of the result of an all_gather: of whichever has more. Of a routed one,
            the elements of a row for each expert of each token. A number, or an expression of the sizes of a step.
        itemsize: bytes per element.
    """

    operation: str
    of: str
    group: str
    ranks: int
    elements: Any
    itemsize: int

    @property
    def rounds(self) -> int:
        """How often every element passes between ranks: twice if each rank gets the sum, else once."""
        return 2 if self.operation == "all_reduce" else 1

    @property
    def routed(self) -> bool:
        """Whether the experts that tokens choose decide how many bytes a rank exchanges."""
        return self.operation in ROUTED

    @property
    def personal(self) -> bool:
        """Whether a rank sends something else to each other rank."""
        return self.routed or self.operation == "all_to_all"

    @property
    def sent(self) -> Any:
        """Bytes that each rank sends if every rank sends the same number, as in a ring; the least that is possible.

        Of a routed collective, those at even load.
        """
        return self.rounds * self.elements * self.itemsize * (self.ranks - 1) / self.ranks


def whole_without_fusion() -> frozenset[str]:
    """Return the operations that a trace keeps so that it has each collective by itself."""
    return frozenset(each.name for each in ops.catalogue().values() if not each.fused)


def collective_calls(step: TracedStep, model: CausalLM) -> list[CollectiveCall]:
    """Return the collectives of a step, in order.

    Args:
        step: traced with :func:`whole_without_fusion`, and not rewritten.
        model: the model that was traced.
    """
    weights = _weights(step, model)
    found = []
    for node, operation in called(step.graph.graph):
        if operation.collective:
            arguments = operation.node_arguments(node.args, node.kwargs)
            tensors = [each for each in map(value, arguments.values()) if isinstance(each, Tensor)]
            if operation.name in ROUTED:
                elements = _count(value(arguments["experts"])) * tensors[0].shape[-1]
            else:
                elements = _count(value(node) if operation.name.startswith("all_gather") else tensors[0])
            ranks = group(arguments[GROUP])
            of = _joined(node, weights)
            found.append(
                CollectiveCall(operation.name, of, ranks.name, ranks.size, elements, tensors[0].dtype.itemsize)
            )
    return found


def called(graph: fx.Graph) -> Iterator[tuple[fx.Node, Operation]]:
    """Yield the calls of operations in a graph."""
    for node in graph.nodes:
        operation = ops.operation_of_node(node.target)
        if operation is not None:
            yield node, operation


def _weights(step: TracedStep, model: CausalLM) -> Mapping[fx.Node, str]:
    """Return the paths of the layers by the placeholders of their weights."""
    inputs = [node for node in step.graph.graph.nodes if node.op == "placeholder"][len(step.fields) :]
    names = dict((*model.named_parameters(), *model.named_buffers()))
    return {node: name.rpartition(".")[0] for node, name in zip(inputs, names, strict=False)}


def _joined(node: fx.Node, weights: Mapping[fx.Node, str]) -> str:
    """Return the layer of the nearest weight from which a node computes."""
    seen, level = {node}, [node]
    while level:
        before = [each for later in level for each in later.all_input_nodes if each not in seen]
        for each in before:
            if each in weights:
                return weights[each]
        seen.update(before)
        level = before
    return ""


def _count(tensor: Tensor) -> Any:
    count: Any = tensor.numel()
    return count if isinstance(count, int) else count.node.expr


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
