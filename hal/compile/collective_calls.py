"""The collectives of a traced step: whose results they join, and how many bytes the ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.symbolic_sizes import value
from hal.compile.trace import TracedStep
from hal.device.group import group as group_named
from hal.nn import CausalLM
from hal.ops import Operation

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
            group = group_named(arguments[GROUP])
            of = _joined(node, weights)
            found.append(
                CollectiveCall(operation.name, of, group.name, group.size, elements, tensors[0].dtype.itemsize)
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
