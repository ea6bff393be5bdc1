"""Finding a pattern in a graph.

In two steps. The first compares structure alone: which nodes read which, whatever the sizes. It runs from the pattern's
end to its inputs, and binds each to a node. From the numbers that it passed on the way come the pattern's own, such as
an epsilon or a count of heads. The second step traces the pattern once more with what was bound, and demands equality
of everything. A trace serves all places that are alike, as the layers of a model are, so the cost is linear in them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hal.compile.normalise import VIEWS, mutates, normalise, same_shape, same_size, value

COMMUTE = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor})
MOST_TRIED = 64
"""Combinations of numbers that a pattern's own may stand for."""


@attrs.frozen(eq=False)
class Match:
    """A place where a pattern was found.

    Attributes:
        arguments: of the pattern, in order: nodes, and numbers.
        nodes: those of the graph that the pattern's stand for, in no order.
        outputs: those of them that the pattern returns.
    """

    arguments: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class NearMiss(Exception):
    """The structure was there, and something else was not."""

    def __init__(self, place: fx.Node, reason: str) -> None:
        super().__init__(f"at {place.name}: {reason}")
        self.place, self.reason = place, reason


def trace_pattern(
    pattern: Callable[..., Any], arguments: Sequence[Any], mode: FakeTensorMode | None = None
) -> fx.Graph:
    """The pattern as a normalised graph, whose placeholders are its tensors in order.

    Args:
        pattern: the function.
        arguments: its arguments; real tensors are made fake, if ``mode`` is None.
        mode: whose fake tensors they are.
    """
    if mode is None:
        mode = FakeTensorMode()
        arguments = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in arguments]
    tensors = [each for each in arguments if isinstance(each, Tensor)]

    def flat(*given: Tensor) -> Any:
        rest = iter(given)
        return pattern(*(next(rest) if isinstance(each, Tensor) else each for each in arguments))

    with torch.inference_mode(False), torch.no_grad(), mode:
        graph: fx.Graph = make_fx(flat, _allow_non_fake_inputs=True)(*tensors).graph
    normalise(graph)
    return graph


class Matcher:
    """Looks for one pattern in graphs of one trace.

    Args:
        pattern: a function of tensors and numbers.
        example: arguments for it, which show its structure.
        mode: whose fake tensors the graphs' nodes carry.
    """

    def __init__(self, pattern: Callable[..., Any], example: Sequence[Any], mode: FakeTensorMode) -> None:
        self._pattern, self._example, self._mode = pattern, list(example), mode
        self._structure = trace_pattern(pattern, example)
        self._traces: dict[str, fx.Graph] = {}
        roots = [node for node in self._structure.nodes if node.op == "call_function"]
        effects = [node for node in roots if mutates(node)]
        self._ends = _outputs(self._structure)
        # From where the search starts: from what reads most of the pattern, a write or an output.
        self.anchor = max(effects or self._ends, key=lambda end: len(_reach(end)))
        while self.anchor.target is operator.getitem or self.anchor.target in VIEWS:
            self.anchor = self.anchor.all_input_nodes[0]

    def at(self, node: fx.Node) -> Match | None:
        """The pattern with its end at ``node``, or None.

        Raises:
            NearMiss: the structure is there, but not its numbers, or something else reads what lies inside.
        """
        if not _alike(self.anchor, node):
            return None
        miss: NearMiss | None = None
        for start in _bind(self.anchor, node, {}):
            for bound in self._completed(start):
                try:
                    return self._checked(bound, node)
                except NearMiss as reason:
                    miss = reason
        if miss is not None:
            raise miss
        return None

    def _checked(self, bound: dict[fx.Node, fx.Node], node: fx.Node) -> Match:
        arguments = self._settle(bound, node)
        inside = [found for part, found in bound.items() if part.op == "call_function"]
        outputs = tuple(bound[end] for end in self._ends)
        for found in inside:
            strangers = [user.name for user in found.users if user not in inside]
            if strangers and found not in outputs:
                raise NearMiss(node, f"{found.name} has another reader, {strangers[0]}")
        return Match(arguments, tuple(inside), outputs)

    def _completed(self, bound: dict[fx.Node, fx.Node]) -> Iterator[dict[fx.Node, fx.Node]]:
        """Bind what the anchor does not read, such as other outputs: it is among the readers of what is bound."""
        missing = [part for part in self._structure.nodes if part.op == "call_function" and part not in bound]
        part = next((each for each in missing if any(read in bound for read in each.all_input_nodes)), None)
        if part is None:
            if not missing:
                yield bound
            return
        known = next(read for read in part.all_input_nodes if read in bound)
        for user in bound[known].users:
            for more in _bind(part, user, bound):
                yield from self._completed(more)

    def _settle(self, bound: dict[fx.Node, fx.Node], place: fx.Node) -> tuple[Any, ...]:
        """The pattern's arguments, its numbers among them, for which all of it is equal."""
        inputs = iter([bound.get(part) for part in self._structure.nodes if part.op == "placeholder"])
        fixed = [next(inputs) if isinstance(each, Tensor) else each for each in self._example]
        numbers = [index for index, each in enumerate(self._example) if not isinstance(each, Tensor)]
        seen = list(_numbers(bound))
        choices = [
            list(dict.fromkeys(found for example, found in seen if _is(example, self._example[index])))
            or [self._example[index]]
            for index in numbers
        ]
        for chosen in itertools.islice(itertools.product(*choices), MOST_TRIED):
            arguments = list(fixed)
            for index, number in zip(numbers, chosen, strict=True):
                arguments[index] = number
            if self._equal(arguments, bound):
                return tuple(arguments)
        raise NearMiss(place, "its shapes or numbers are not those of the pattern")

    def _equal(self, arguments: list[Any], bound: dict[fx.Node, fx.Node]) -> bool:
        values = [value(each) for each in arguments]
        key = repr([_signature(each) for each in values])
        if key not in self._traces:
            try:
                self._traces[key] = trace_pattern(self._pattern, values, self._mode)
            except (RuntimeError, ValueError, TypeError):  # numbers for which the pattern has no meaning
                self._traces[key] = fx.Graph()
        again = [node for node in self._traces[key].nodes if node.op != "output"]
        parts = [node for node in self._structure.nodes if node.op != "output"]
        if [_kind(node) for node in again] != [_kind(node) for node in parts]:
            return False
        places = {node: bound.get(part) for node, part in zip(again, parts, strict=True)}
        return all(_same(node, found, places) for node, found in places.items() if found is not None)


def _reach(node: fx.Node) -> set[fx.Node]:
    """A node and all that it reads, directly or not."""
    return {node}.union(*map(_reach, node.all_input_nodes))


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    (returned,) = next(node for node in graph.nodes if node.op == "output").args
    return [returned] if isinstance(returned, fx.Node) else list(returned)


def _kind(node: fx.Node) -> Any:
    return "view" if node.target in VIEWS else node.target if node.op == "call_function" else node.op


def _alike(part: fx.Node, found: Any) -> bool:
    return isinstance(found, fx.Node) and found.op == "call_function" and _kind(part) == _kind(found)


def _bind(part: fx.Node, found: Any, bound: dict[fx.Node, fx.Node]) -> Iterator[dict[fx.Node, fx.Node]]:
    """Every way in which ``part`` and all that it reads can stand for ``found`` and what that reads."""
    if part in bound:
        if bound[part] is found:
            yield bound
        return
    if part.op == "placeholder":
        if isinstance(found, fx.Node) and isinstance(value(found), Tensor):
            yield {**bound, part: found}
        return
    if not _alike(part, found) or found in bound.values():
        return
    if part.target is operator.getitem and part.args[1] != found.args[1]:
        return
    reads, given = list(part.args), list(found.args)
    if part.target in VIEWS:
        reads, given = reads[:1], given[:1]
    orders = [given, given[::-1]] if part.target in COMMUTE and len(given) == 2 else [given]
    for order in orders:
        pairs = [(read, one) for read, one in zip(reads, order, strict=False) if isinstance(read, fx.Node)]
        yield from _bind_all(pairs, {**bound, part: found})


def _bind_all(pairs: list[tuple[fx.Node, Any]], bound: dict[fx.Node, fx.Node]) -> Iterator[dict[fx.Node, fx.Node]]:
    if not pairs:
        yield bound
        return
    for each in _bind(*pairs[0], bound):
        yield from _bind_all(pairs[1:], each)


def _numbers(bound: dict[fx.Node, fx.Node]) -> Iterator[tuple[Any, Any]]:
    """The numbers of the pattern's example, each with the one in its place in the graph."""
    for part, found in bound.items():
        if part.op != "call_function":
            continue
        if isinstance(value(part), Tensor):
            yield from zip(value(part).shape, value(found).shape, strict=False)
        yield from zip(_filled(part), _filled(found), strict=False)


def _filled(node: fx.Node) -> list[Any]:
    """A call's arguments with the defaults that it leaves out."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return list(node.args)
    named = dict(node.kwargs)
    arguments = node.target._schema.arguments
    rest = [named.get(each.name, each.default_value if each.has_default_value() else None) for each in arguments]
    return [*node.args, *rest[len(node.args) :]]


def _is(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def _same(node: fx.Node, found: fx.Node, places: dict[fx.Node, fx.Node | None]) -> bool:
    """Whether a node of the pattern's own trace and the one that it stands for agree in everything."""
    here, there = value(node), value(found)
    if isinstance(here, Tensor) and not (
        isinstance(there, Tensor) and here.dtype == there.dtype and same_shape(here.shape, there.shape)
    ):
        return False
    if node.op != "call_function" or node.target in VIEWS:
        return True
    pairs = list(zip(_filled(node), _filled(found), strict=False))
    if node.target in COMMUTE and isinstance(pairs[0][0], fx.Node) and places.get(pairs[0][0]) is not pairs[0][1]:
        pairs = [(pairs[0][0], pairs[1][1]), (pairs[1][0], pairs[0][1]), *pairs[2:]]
    return all(
        places.get(one) is other if isinstance(one, fx.Node) and one in places else same_size(one, other)
        for one, other in pairs
    )


def _signature(each: Any) -> Any:
    if isinstance(each, Tensor):
        return [str(size) for size in each.shape], [str(step) for step in each.stride()], each.dtype, str(each.device)
    return each
