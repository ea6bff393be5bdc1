"""Clean-up after the rewrites: removal of duplicate and redundant nodes.

A returned tensor never shares memory with anything that it did not share with before, because the caller may write to
it. A node counts as returned if the graph returns it or any view of its memory.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.alias_analysis import AliasAnalysis, may_alias_input, mutates, needed, written
from hal.compile.fx.arithmetic import number_key
from hal.compile.fx.symbolic_sizes import value

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, aten.contiguous.default})
FILLS = frozenset({aten.ones_like.default, aten.zeros_like.default, aten.full_like.default})
"""Operators that read no element of their operand, only its shape."""
LARGEST_CONSTANT = 1 << 20
"""The most bytes of a constant that is stored with a graph."""


def common_subexpressions(graph: fx.GraphModule) -> int:
    """Merge nodes that compute the same from the same inputs, such as position tables. Return the number removed.

    Nodes that read memory that the graph writes are kept, since a second read may differ. Two nodes that are both
    returned keep separate memory.
    """
    busy, returned = _written_and_returned(graph.graph)
    known: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not _pure(node) or any(each in busy for each in node.all_input_nodes):
            continue
        if node in busy:
            continue
        first = known.setdefault(_key(node), node)
        if first is node or (node in returned and first in returned and not may_alias_input(node)):
            continue
        node.replace_all_uses_with(first)
        graph.graph.erase_node(node)
        if node in returned:
            returned.add(first)
        count += 1
    return count


def reciprocals(graph: fx.GraphModule) -> int:
    """Replace a reciprocal's reciprocal by its operand, unless it is returned. Return the number replaced."""
    busy, returned = _written_and_returned(graph.graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.target is not aten.reciprocal.default or node.args[0].target is not aten.reciprocal.default:
            continue
        number = node.args[0].args[0]
        if node in returned or not busy.isdisjoint({node, node.args[0], number}):
            continue
        if value(number).dtype == value(node).dtype:
            node.replace_all_uses_with(number)
            graph.graph.erase_node(node)
            count += 1
    _drop_unread(graph.graph)
    return count


def needless_copies(graph: fx.GraphModule) -> int:
    """Replace copies by their source if both have the same strides and neither is written. Return the number removed.

    Returned copies are kept.
    """
    busy, returned = _written_and_returned(graph.graph)
    count = 0
    for node in list(graph.graph.nodes):
        source = _copied(node)
        if source is None:
            continue
        fakes = value(source), value(node)
        alike = all(isinstance(each, Tensor) for each in fakes) and str(fakes[0].stride()) == str(fakes[1].stride())
        alike = alike and fakes[0].dtype is fakes[1].dtype
        if alike and node not in returned and node not in busy and source not in busy:
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            count += 1
    return count


def constants(graph: fx.GraphModule) -> int:
    """Compute nodes that depend on no input, such as rotary frequencies. Return the number of nodes.

    The results that other nodes read become attributes of the graph's module. Large results are not stored, nor are
    returned ones, because an attribute would be the same memory at every call.
    """
    busy, returned = _written_and_returned(graph.graph)
    known: dict[fx.Node, Tensor] = {}
    for node in graph.graph.nodes:
        if node in busy or node in returned:
            continue
        if node.op == "get_attr":
            known[node] = operator.attrgetter(node.target)(graph)
        elif node.op == "call_function" and _pure(node) and _small(node) and known.keys() >= {*node.all_input_nodes}:
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.inference_mode(False), torch.no_grad():
                known[node] = node.target(*args, **kwargs)
    found = [node for node in known if node.op == "call_function"]
    for node in found:
        if all(user in known for user in node.users):
            continue
        name = next(each for index in itertools.count() if not hasattr(graph, each := f"constant_{index}"))
        graph.register_buffer(name, known[node].clone(), persistent=False)
        with graph.graph.inserting_before(node):
            attribute = graph.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        for user in [each for each in node.users if each not in known]:
            user.replace_input_with(node, attribute)
    for node in reversed(found):
        graph.graph.erase_node(node)
    return len(found)


CLEANUPS = (common_subexpressions, reciprocals, needless_copies, constants)


def _copied(node: fx.Node) -> Any:
    """Return what a node copies, or None: a concatenation of one tensor and a product with 1 are copies, too."""
    if node.target is aten.cat.default:
        tensors: Any = node.args[0]
        return tensors[0] if len(tensors) == 1 else None
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        return node.args[0] if type(node.args[1]) in (int, float) and node.args[1] == 1 else None
    return node.args[0] if node.target in COPIES else None


def _small(node: fx.Node) -> bool:
    """Return whether a node returns one ATen tensor of known shape and at most :data:`LARGEST_CONSTANT` bytes."""
    fake = value(node)
    if not isinstance(fake, Tensor) or node.target.namespace != "aten":  # type: ignore[union-attr]
        return False
    if not all(type(size) is int for size in fake.shape):
        return False
    return math.prod(fake.shape) * fake.element_size() <= LARGEST_CONSTANT  # ``nbytes`` needs known strides.


def _pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or mutates(node):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    operation = ops.operation_of_node(target)
    return operation is None or not operation.mutates


def _key(node: fx.Node) -> Any:
    args = node.args
    if node.target in FILLS:
        fake = value(node)
        args = (str(fake.shape), str(fake.stride()), fake.dtype, fake.device, *args[1:])
    return node.target, _frozen(args), _frozen(node.kwargs)


def _frozen(value: Any) -> Any:
    """Return a hashable key that separates numbers of different types, and 0.0 from -0.0."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()))
    return number_key(value)


def _written_and_returned(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes whose memory the graph writes, and those whose memory it returns, through any view."""
    memory = AliasAnalysis(graph)
    writes = {place for node in graph.nodes for each in written(node) for place in memory.places(each)}
    busy, returned = (
        {node for place in places for node in memory.aliases(place)} for places in (writes, memory.returned)
    )
    for nodes in busy, returned:
        # A tuple itself aliases no memory; its parts do.
        nodes.update([each for node in nodes if node.target is operator.getitem for each in node.all_input_nodes])
    return busy, returned


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and not needed(node):
            graph.erase_node(node)
