"""Clean-up behind the rewrites: what is computed twice is computed once, and what need not be done is left out.

None of it lets what the graph returns share memory with anything that it did not share it with before: whoever calls
the graph may write into that. A node is returned if the graph returns it or any view of its memory.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.fx.alias_analysis import Memory, mutates, needed, shows, written
from hal.compile.fx.arithmetic import number_key
from hal.compile.fx.symbolic_sizes import value

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, aten.contiguous.default})
LARGEST_CONSTANT = 1 << 20
"""Bytes of a constant that is kept with a graph."""


def common_subexpressions(graph: fx.GraphModule) -> int:
    """Compute once what is computed several times from the same inputs, such as tables of positions; returns how many.

    What reads memory that the graph writes stays as it is: it may read something else the second time. Of two that are
    both returned, each stays memory of its own.
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
        if first is node or (node in returned and first in returned and not shows(node)):
            continue
        node.replace_all_uses_with(first)
        graph.graph.erase_node(node)
        if node in returned:
            returned.add(first)
        count += 1
    return count


def reciprocals(graph: fx.GraphModule) -> int:
    """Read a number in place of its reciprocal's reciprocal, unless that is returned; returns how many there were."""
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
    """Read the source in place of its copy, if both have the same strides and neither is written; returns how many.

    A copy that is returned stays.
    """
    busy, returned = _written_and_returned(graph.graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.target not in COPIES:
            continue
        source = node.args[0]
        fakes = value(source), value(node)
        alike = all(isinstance(each, Tensor) for each in fakes) and str(fakes[0].stride()) == str(fakes[1].stride())
        if alike and node not in returned and node not in busy and source not in busy:
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            count += 1
    return count


def constants(graph: fx.GraphModule) -> int:
    """Compute now what depends on no input, such as the frequencies of a rotary embedding; returns how many nodes.

    The results become attributes of the graph's module, those that others read. Large ones are left to be computed, and
    so is what is returned, for an attribute would be the same memory at every call.
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


def _small(node: fx.Node) -> bool:
    """Whether a node gives one tensor of torch's, of known shape and at most :data:`LARGEST_CONSTANT` bytes."""
    fake = value(node)
    if not isinstance(fake, Tensor) or node.target.namespace != "aten":  # type: ignore[union-attr]
        return False
    if not all(type(size) is int for size in fake.shape):
        return False
    return math.prod(fake.shape) * fake.element_size() <= LARGEST_CONSTANT  # ``nbytes`` wants strides that are known


def _pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or mutates(node):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        return False
    operation = ops.operation_of_node(target)
    return operation is None or not operation.mutates


def _key(node: fx.Node) -> Any:
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(value: Any) -> Any:
    """A key that tells numbers of different types apart, and 0.0 from -0.0: they would share one."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()))
    return number_key(value)


def _written_and_returned(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes whose memory is written somewhere in the graph, and those whose memory it returns; by any view of it."""
    memory = Memory(graph)
    writes = {place for node in graph.nodes for each in written(node) for place in memory.places(each)}
    busy, returned = (
        {node for place in places for node in memory.members(place)} for places in (writes, memory.returned)
    )
    for nodes in busy, returned:
        # A tuple shows no memory itself; its parts do.
        nodes.update([each for node in nodes if node.target is operator.getitem for each in node.all_input_nodes])
    return busy, returned


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and not needed(node):
            graph.erase_node(node)
