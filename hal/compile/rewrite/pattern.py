"""Tracing of patterns, which are functions of tensors and numbers, to graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.fx.arithmetic import number_key, scaled_inverse
from hal.compile.fx.make_graph import make_graph
from hal.compile.fx.normalize import normalize


def trace_function(function: Callable[..., Any], arguments: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """Return the overloads that ``function`` calls as a graph, whose placeholders are its tensors in order."""
    tensors: list[Tensor] = []
    with mode:
        for each in arguments:
            if isinstance(each, Tensor):  # A tensor that is passed twice is two arguments.
                tensors.append(each.detach() if any(each is other for other in tensors) else each)

    def flat(*given: Tensor) -> Any:
        rest = iter(given)
        return function(*(next(rest) if isinstance(each, Tensor) else each for each in arguments))

    return make_graph(flat, tensors, mode)


def trace_pattern(
    pattern: Callable[..., Any], arguments: Sequence[Any], mode: FakeTensorMode | None = None
) -> fx.Graph:
    """Return the pattern as a normalized graph, whose placeholders are its tensors in order.

    Args:
        pattern: the function.
        arguments: its arguments; if ``mode`` is None, real tensors, which are converted to fake ones.
        mode: the mode of the fake tensors.
    """
    graph = _trace(pattern, arguments, mode)
    normalize(graph)
    return graph


def trace_forms(pattern: Callable[..., Any], example: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], fx.Graph]]:
    """Yield the example with the pattern's normalized graph, and others with which it has other calls.

    With them, a pattern with ``number / x`` calls one multiplication less, or one more: a factor of 1 is dropped; see
    :func:`~hal.compile.fx.arithmetic.is_unit_factor`.
    """
    graph = _trace(pattern, example)
    factors = [number_key(node.args[1]) for node in graph.nodes if scaled_inverse(node)]
    normalize(graph)
    yield tuple(example), graph
    for index, given in enumerate(example):
        if type(given) in (int, float) and number_key(given) in factors:
            other = (*example[:index], type(given)(3 if given == 1 else 1), *example[index + 1 :])
            yield other, trace_pattern(pattern, other)


def _trace(pattern: Callable[..., Any], arguments: Sequence[Any], mode: FakeTensorMode | None = None) -> fx.Graph:
    if mode is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        arguments = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in arguments]
    return trace_function(pattern, arguments, mode).graph


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the outputs of a graph as a list."""
    (returned,) = next(node for node in reversed(graph.nodes) if node.op == "output").args
    if returned is None:
        return []
    return [returned] if isinstance(returned, fx.Node) else [each for each in returned if each is not None]


def copy_calls(traced: fx.Graph, into: fx.Graph, tensors: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Copy a traced function's calls to where ``into`` inserts nodes.

    Args:
        traced: the graph of the function.
        into: another graph.
        tensors: the nodes of ``into`` for the placeholders, in order.

    Returns:
        The copies, and those of them that are the function's results.
    """
    given = iter(tensors)
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.nodes:
        if node.op == "placeholder":
            copies[node] = next(given)
        elif node.op == "call_function":
            copies[node] = into.node_copy(node, copies.__getitem__)
    made = [copy for node, copy in copies.items() if node.op == "call_function"]
    return made, [copies[each] for each in outputs_of(traced)]


def names_of(pattern: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of a pattern's arguments."""
    try:
        known = list(inspect.signature(pattern).parameters)
    except (TypeError, ValueError):
        known = []
    return tuple(known[index] if index < len(known) else f"argument {index}" for index in range(count))


def signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key for everything that a trace with these arguments depends on."""
    return tuple(
        (tuple(map(_key, each.shape)), tuple(map(_key, each.stride())), each.dtype, each.device)
        if isinstance(each, Tensor)
        else number_key(each)
        for each in values
    )


def _key(size: Any) -> Any:
    return size if type(size) is int else size.node.expr
