"""Merging of the projections that read one input, such as those of query, key and value.

hal's own models load such weights merged. A model in plain torch has them apart, so their concatenation is computed
when the graph first runs, and again after a weight has changed. It takes as much memory as the weights.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.symbolic_sizes import value

aten = torch.ops.aten
log = logging.getLogger("hal.compile")

VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


@attrs.define
class MergedWeights:
    """The concatenated weights of a graph, as inputs behind its others.

    Attributes:
        groups: the indices of the inputs that each of them concatenates, along dimension 0.
    """

    groups: list[tuple[int, ...]] = attrs.field(factory=list)
    _made: list[tuple[tuple[Tensor, ...], tuple[Any, ...], Tensor]] = attrs.field(factory=list)

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the concatenated weights for a call's inputs: those of the last call, if no weight has changed."""
        for place, group in enumerate(self.groups):
            weights = tuple(inputs[index] for index in group)
            # ``weight.data = other`` changes the address only, and a write in place the version only.
            state = tuple([(each._version, each.data_ptr()) for each in weights])
            if place < len(self._made):
                known, before, _ = self._made[place]
                if state == before and all(one is other for one, other in zip(weights, known, strict=True)):
                    continue
            with torch.inference_mode(False), torch.no_grad():
                made = weights, state, torch.cat([each.detach() for each in weights])
            self._made[place : place + 1] = [made]
        return [merged for *_, merged in self._made]


class MergeProjections:
    """The pass that merges projections. It adds an input to the graph for every concatenated weight.

    Args:
        parameters: the indices of the inputs that are parameters, which alone may be concatenated in advance.
    """

    __name__ = "merge_projections"

    def __init__(self, parameters: Collection[int]) -> None:
        self._parameters = parameters
        self.weights = MergedWeights()

    def __call__(self, module: fx.GraphModule) -> int:
        """Merge projections, and return the number of merged ones that take their places."""
        graph = module.graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        places = {node: index for index, node in enumerate(inputs) if index in self._parameters}
        count = 0
        for group in _groups(graph, places):
            merged = []
            for weights in zip(*map(_weights, group), strict=True):
                self.weights.groups.append(tuple(places[each] for each in weights))
                merged.append(_added_input(graph, weights))
            _merge(graph, group, merged)
            count += 1
        for node in list(graph.nodes):
            if node.target is aten.mul.Tensor:
                _before_the_views(graph, node)
        return count

    def log_memory(self, inputs: Sequence[Any]) -> None:
        """Log how much memory the concatenated weights take."""
        if self.weights.groups:
            taken = sum(inputs[index].nbytes for group in self.weights.groups for index in group)
            log.info(
                "merge_projections keeps %.1f MiB of concatenated weights beside the model's own; "
                'options={"passes": {"merge_projections": False}} saves them',
                taken / 2**20,
            )


def _groups(graph: fx.Graph, places: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """Return the projections that can be merged: a gate with what it is multiplied by, or all others of one input."""
    by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        operation = ops.operation_of_node(node.target) if node.op == "call_function" else None
        if operation is not None and operation.name == "linear" and all(each in places for each in _weights(node)):
            dtypes = tuple(value(each).dtype for each in _weights(node))
            by_input.setdefault((node.args[0], dtypes), []).append(node)
    found = []
    for group in by_input.values():
        left = list(group)
        for gate in group:
            up = _multiplied_by(gate, left)
            if up is not None and gate in left:
                found.append([gate, up])
                left = [each for each in left if each not in (gate, up)]
        found.append(left)
    return [each for each in found if len(each) > 1]


def _added_input(graph: fx.Graph, weights: Sequence[fx.Node]) -> fx.Node:
    """Return a new last input of a graph, for the concatenation of weights."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        merged = graph.placeholder(f"merged_{weights[0].name}")
    fakes = [value(each) for each in weights]
    with fakes[0].fake_mode, torch.inference_mode(False), torch.no_grad():
        merged.meta["val"] = torch.cat(fakes)
    return merged


def _weights(node: fx.Node) -> list[Any]:
    """Return the weight of a projection, and its bias if it has one."""
    return [each for each in node.args[1:] if each is not None]


def _multiplied_by(gate: fx.Node, others: Collection[fx.Node]) -> fx.Node | None:
    """Return the projection that is multiplied by the activation of another, or None."""
    for activation in _readers(gate):
        if activation.target is aten.silu.default:
            for product in _readers(activation):
                for operand in product.all_input_nodes if product.target is aten.mul.Tensor else ():
                    while operand.target in VIEWS:
                        operand = operand.all_input_nodes[0]
                    if operand in others and operand is not gate:
                        return operand
    return None


def _before_the_views(graph: fx.Graph, product: fx.Node) -> None:
    """Compute the product of an activated gate before its operands are reshaped, as the activation's operation does."""
    for activation, view in itertools.permutations(product.args[:2]):
        if not isinstance(activation, fx.Node) or activation.target is not aten.silu.default:
            continue
        gate: Any = activation.args[0]
        views: list[Any] = [gate, view]
        if not all(isinstance(each, fx.Node) and each.target in VIEWS for each in views):
            continue
        sources = [each.args[0] for each in views]
        shapes = [[*map(str, value(each).shape)] for each in (*sources, gate, view)]
        if shapes[0] != shapes[1] or shapes[2] != shapes[3] or len(activation.users) > 1:
            continue
        with value(product).fake_mode, torch.inference_mode(False), torch.no_grad(), graph.inserting_before(product):
            activated = graph.call_function(aten.silu.default, (sources[0],))
            activated.meta["val"] = aten.silu.default(value(sources[0]))
            multiplied = graph.call_function(aten.mul.Tensor, (activated, sources[1]))
            multiplied.meta = {**product.meta, "val": aten.mul.Tensor(value(activated), value(sources[1]))}
            shaped = graph.call_function(aten.view.default, (multiplied, gate.args[1]))
            shaped.meta = dict(product.meta)
        product.replace_all_uses_with(shaped)
        for each in (product, activation):
            graph.erase_node(each)
        return


def _readers(node: fx.Node) -> list[fx.Node]:
    return [more for each in node.users for more in (_readers(each) if each.target in VIEWS else [each])]


def _merge(graph: fx.Graph, group: list[fx.Node], merged: list[fx.Node]) -> None:
    """Replace projections by slices of one with the merged weight, and bias if there is one."""
    first = min(group)
    arguments = (first.args[0], *merged, *[None] * (2 - len(merged)))
    start = 0
    with value(merged[0]).fake_mode, torch.inference_mode(False), torch.no_grad(), graph.inserting_before(first):
        projected = graph.call_function(ops.operation("linear").overload, arguments)
        projected.meta["val"] = projected.target(*map(value, arguments))  # type: ignore[operator]
        for each in group:
            end = start + value(each.args[1]).shape[0]
            part = graph.call_function(aten.slice.Tensor, (projected, 1, start, end))
            part.meta = {**each.meta, "val": aten.slice.Tensor(value(projected), 1, start, end)}
            each.replace_all_uses_with(part)
            start = end
    for each in group:
        graph.erase_node(each)
