"""Merging of the projections that read one input, such as those of query, key and value.

hal's own models load such weights merged. A model in plain torch has them apart. They are moved into one storage, where
the merged weight is a view of them all: it is never stale, however a weight is written, and takes no memory.

The weights stay the same parameters, with the same values. What aliased their former memory would no longer alias them,
so only weights are moved whose memory nothing else can write: :func:`why_not_moved` finds what else refers to it.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import shared_cache

from hal import ops
from hal.compile.fx.alias_analysis import AliasAnalysis
from hal.compile.fx.symbolic_sizes import value

aten = torch.ops.aten
log = logging.getLogger("hal.compile")

GATES = frozenset({aten.silu.default, aten.gelu.default})
"""Activations of a gate."""
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


class MergedWeights:
    """The merged weights of a graph, as inputs behind its others."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, ...]] = []
        self._views: list[Tensor | None] = []
        self._replaced = False

    def add(self, group: tuple[int, ...]) -> None:
        """Add the merged weight of the inputs with these indices."""
        self._groups.append(group)
        self._views.append(None)

    def move(self, inputs: Sequence[Any]) -> None:
        """Move the weights of each merged one into one storage, unless they are in one."""
        for group in self._groups:
            weights = [inputs[index] for index in group]
            if concatenated(weights) is None and why_not_moved(weights) is None:
                move_together(weights)

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor] | None:
        """Return the merged weights for a call's inputs; None from when the weights of one are not in one storage."""
        if self._replaced:
            return None
        for place, group in enumerate(self._groups):
            weights = [inputs[index] for index in group]
            if not _is_view_of(self._views[place], weights):
                self._views[place] = concatenated(weights)
                if self._views[place] is None:
                    self._replaced = True
                    self._views.clear()  # They would keep the storages of replaced weights.
                    return None
        return self._views  # type: ignore[return-value]


def _is_view_of(merged: Tensor | None, weights: Sequence[Tensor]) -> bool:
    """Return whether a merged weight is still that of these, whose shapes and strides Dynamo guards."""
    if merged is None:
        return False
    address = merged.data_ptr()  # The view keeps its storage, so nothing else can have these addresses.
    for each in weights:
        if each.data_ptr() != address:
            return False
        address += each.nbytes
    return True


class MergeProjections:
    """The pass that merges projections. It adds an input to the graph for every merged weight.

    Args:
        inputs: of the graph.
        weights: a function that returns the indices of the inputs whose projections may be merged.
    """

    __name__ = "merge_projections"

    def __init__(self, inputs: Sequence[Any], weights: Callable[[], Collection[int]]) -> None:
        self._inputs = inputs
        self._mergeable = weights
        self._moved: set[int] = set()
        self.weights = MergedWeights()

    def __call__(self, module: fx.GraphModule) -> int:
        """Merge projections, and return the number of merged ones that take their places."""
        graph = module.graph
        memory, mergeable = AliasAnalysis(graph), self._mergeable()
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        places = {
            node: index
            for index, node in enumerate(inputs)
            if index in mergeable and not any(True for _ in memory.writers(node))
        }
        count = 0
        for group in _groups(graph, places):
            parts = list(zip(*map(_weights, group), strict=True))
            indices = [tuple(places[each] for each in weights) for weights in parts]
            reason = self._why_apart(indices)
            if reason is not None:
                log.info("merge_projections: %d projections of one input stay apart: %s", len(group), reason)
                continue
            merged = []
            for weights, places_of_weights in zip(parts, indices, strict=True):
                self.weights.add(places_of_weights)
                merged.append(_added_input(graph, weights))
            _merge(graph, group, merged)
            count += 1
        for node in list(graph.nodes):
            if node.target is aten.mul.Tensor:
                _before_the_views(graph, node)
        return count

    def _why_apart(self, groups: Sequence[tuple[int, ...]]) -> str | None:
        """Return why weights, or their biases, cannot be in one storage. Otherwise note which must be moved."""
        moved: set[int] = set()
        for group in groups:
            weights = [self._inputs[index] for index in group]
            if concatenated(weights) is None:
                reason = why_not_moved(weights)
                if reason is None and not self._moved.isdisjoint(group):
                    reason = "a weight is merged with others already"
                if reason is not None:
                    return reason
                moved.update(group)
        self._moved |= moved
        return None


def _groups(graph: fx.Graph, places: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    """Return the projections that can be merged: a gate with what it is multiplied by, or all others of one input."""
    by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        operation = ops.operation_of_node(node.target)
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
        if activation.target in GATES:
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
        if not isinstance(activation, fx.Node) or activation.target not in GATES:
            continue
        function: Any = activation.target
        gate: Any = activation.args[0]
        views: list[Any] = [gate, view]
        if not all(isinstance(each, fx.Node) and each.target in VIEWS for each in views):
            continue
        sources = [each.args[0] for each in views]
        shapes = [[*map(str, value(each).shape)] for each in (*sources, gate, view)]
        if shapes[0] != shapes[1] or shapes[2] != shapes[3] or len(activation.users) > 1:
            continue
        with value(product).fake_mode, torch.inference_mode(False), torch.no_grad(), graph.inserting_before(product):
            activated = graph.call_function(function, (sources[0],), activation.kwargs)
            activated.meta["val"] = function(value(sources[0]), **activation.kwargs)
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


def concatenated(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the concatenation of weights along dimension 0 as a view, or None if they do not lie one after another."""
    first = weights[0]
    storage, end = first.untyped_storage()._cdata, first.storage_offset()
    for each in weights:
        same = each.untyped_storage()._cdata == storage and each.dtype is first.dtype
        if not same or each.storage_offset() != end or not each.is_contiguous():
            return None
        end += each.numel()
    shape = sum(each.shape[0] for each in weights), *first.shape[1:]
    with torch.inference_mode(False), torch.no_grad():
        return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def move_together(weights: Sequence[Tensor]) -> None:
    """Move weights, for which :func:`why_not_moved` returns None, into a new storage, one after another."""
    with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
        merged = torch.cat([each.detach() for each in weights])
        start = 0
        for each in weights:
            each.data = merged.narrow(0, start, each.shape[0])
            start += each.shape[0]


def why_not_moved(weights: Sequence[Tensor]) -> str | None:
    """Return why weights cannot be moved into one storage, or None if they can."""
    first = weights[0]
    if any(each is other for index, each in enumerate(weights) for other in weights[:index]):
        return "one weight occurs twice"
    if any(each.is_inference() != first.is_inference() or each.device != first.device for each in weights):
        return "some weights were made in inference mode, or are on another device"
    return next((reason for each in weights if (reason := _owned_elsewhere(each)) is not None), None)


def _owned_elsewhere(weight: Tensor) -> str | None:
    """Return what else may write a weight's memory, or None if only the weight refers to it."""
    if type(weight) is not nn.Parameter:
        return f"a weight is a {type(weight).__name__}, not a plain parameter"
    references = _references(weight)  # before this function refers to the storage
    storage = weight.untyped_storage()
    if not weight.is_contiguous() or storage.nbytes() != weight.nbytes:
        return "a weight is a part of another tensor, or not contiguous"
    exported = {each.cdata for each in shared_cache.values()}
    if (weight.is_cpu and storage.is_shared()) or storage._cdata in exported:
        return "other processes share a weight's memory"
    if not storage.resizable():
        return "a weight's memory is that of a file, of numpy or of another library"
    if references != _references(torch.empty(1, device=weight.device)):
        return "another tensor shares a weight's memory"
    return None


def _references(tensor: Tensor) -> tuple[Any, int]:
    """Return the references to a tensor's storage: of tensors, in C++, and of Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
