"""Clean-up behind the rewrites: what is computed twice is computed once, and what need not be done is left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hal import ops
from hal.compile.normalise import mutates, value

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, aten.contiguous.default})


def common_subexpressions(graph: fx.GraphModule) -> int:
    """Compute once what is computed several times from the same inputs, such as tables of positions; returns how many.

    What reads memory that the graph writes stays as it is: it may read something else the second time.
    """
    written = _written(graph.graph)
    known: dict[Any, fx.Node] = {}
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not _pure(node) or any(each in written for each in node.all_input_nodes):
            continue
        if node in written:
            continue
        key = _key(node)
        if (first := known.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)
            count += 1
    return count


def reciprocals(graph: fx.GraphModule) -> int:
    """The reciprocal of a reciprocal is the number itself; returns how many pairs were found."""
    count = 0
    for node in list(graph.graph.nodes):
        if node.target is aten.reciprocal.default and node.args[0].target is aten.reciprocal.default:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.graph.erase_node(node)
            count += 1
    _drop_unread(graph.graph)
    return count


def needless_copies(graph: fx.GraphModule) -> int:
    """Read the source in place of its copy, if both have the same strides and neither is written; returns how many.

    A copy that the graph returns stays, for its reader may keep it longer than the source lives.
    """
    written = _written(graph.graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.target not in COPIES:
            continue
        source = node.args[0]
        fakes = value(source), value(node)
        alike = all(isinstance(each, Tensor) for each in fakes) and str(fakes[0].stride()) == str(fakes[1].stride())
        returned = any(user.op == "output" for user in node.users)
        if alike and not returned and node not in written and source not in written:
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
            count += 1
    return count


CLEANUPS = (common_subexpressions, reciprocals, needless_copies)


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
    """A key that tells numbers of different types apart: 1, 1.0 and True would share one."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in sorted(value.items()))
    return type(value), value


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory is written somewhere in the graph: written arguments, and every view of the same memory."""
    family: dict[fx.Node, fx.Node] = {}

    def oldest(node: fx.Node) -> fx.Node:
        while node in family:
            node = family[node]
        return node

    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            for read in node.all_input_nodes[:1]:  # a part of a tuple, or a size
                family[node] = oldest(read)
            continue
        schema = node.target._schema
        for argument, given in zip(schema.arguments, node.args, strict=False):
            if not isinstance(given, fx.Node) or argument.alias_info is None:
                continue
            if argument.alias_info.is_write:
                written.add(oldest(given))
            if any(result.alias_info is not None for result in schema.returns):
                family[node] = oldest(given)
        for argument in schema.arguments:
            given = node.kwargs.get(argument.name)
            if isinstance(given, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write:
                written.add(oldest(given))
    return {node for node in graph.nodes if oldest(node) in written}


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not mutates(node):
            graph.erase_node(node)
