"""Finding a pattern in a graph.

In two steps. The first compares structure alone: which nodes read which, whatever the sizes. It runs from the pattern's
end to its inputs, and binds each to a node. From the numbers that it passed on the way come the pattern's own, such as
an epsilon or a count of heads. The second step traces the pattern once more with what was bound, and demands equality
of everything. A trace serves all places that are alike, as the layers of a model are, so the cost is linear in them.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.fx.arithmetic import number_key, number_like
from hal.compile.fx.normalise import IN_PLACE, VIEWS, mutates, value
from hal.compile.rewrite.node_match import (
    Binding,
    alike,
    bind,
    computes,
    difference,
    is_same_number,
    kind,
    numbers_of,
    reach,
    same,
)
from hal.compile.rewrite.pattern import names_of, outputs_of, signature, trace_pattern
from hal.errors import CompileError

MOST_TRIED = 64
"""Combinations of numbers that a pattern's own may stand for."""

_SAYS = logging.getLogger("torch._subclasses.fake_tensor")
"""It logs what goes wrong on fake tensors, and what is tried here may."""


@attrs.frozen(eq=False)
class Match:
    """A place where a pattern was found.

    Attributes:
        arguments: of the pattern, in order: nodes, and numbers.
        nodes: those of the graph that the pattern's stand for, in the order in which the pattern calls them.
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


class Matcher:
    """Looks for one pattern in graphs of one trace.

    Args:
        pattern: a function of tensors and numbers.
        example: arguments for it, which show its structure.
        mode: whose fake tensors the graphs' nodes carry.
        structure: the pattern's trace with the example, if there is one already.

    Raises:
        CompileError: there is nothing in the pattern that could be found.
    """

    def __init__(
        self,
        pattern: Callable[..., Any],
        example: Sequence[Any],
        mode: FakeTensorMode,
        structure: fx.Graph | None = None,
    ) -> None:
        self._pattern, self._example, self._mode = pattern, list(example), mode
        if structure is None:
            structure = trace_pattern(pattern, example)
            self.check(pattern, example, structure)
        self._structure = structure
        self._traces: dict[Any, list[fx.Node] | Exception] = {}
        self._inputs = [node for node in self._structure.nodes if node.op == "placeholder"]
        self._calls = [node for node in self._structure.nodes if computes(node)]
        self._ends = outputs_of(self._structure)
        effects = [node for node in self._calls if mutates(node)]
        # From where the search starts: from what reads most of the pattern, a write or an output.
        self.anchor = max(effects or self._ends, key=lambda end: len(reach(end)))
        while self.anchor.target is operator.getitem or self.anchor.target in VIEWS:
            self.anchor = self.anchor.all_input_nodes[0]

    def at(self, node: fx.Node) -> Match | None:
        """The pattern with its end at ``node``, or None.

        Raises:
            NearMiss: the structure is there, but not its numbers, or something else reads what lies inside.
        """
        if not alike(self.anchor, node):
            return None
        miss: NearMiss | None = None
        for start in bind(self.anchor, node, {}):
            for bound in self._completed(start):
                try:
                    return self._checked(bound, node)
                except NearMiss as reason:
                    miss = reason
        if miss is None:
            miss = self._but_for(node)
        if miss is not None:
            raise miss
        return None

    @staticmethod
    def check(pattern: Callable[..., Any], example: Sequence[Any], structure: fx.Graph) -> None:
        """Raise CompileError unless a pattern, of which this is the trace with the example, can be looked for."""
        inputs = [node for node in structure.nodes if node.op == "placeholder"]
        calls = [node for node in structure.nodes if computes(node)]
        if all(node.target is operator.getitem or node.target in VIEWS for node in calls):
            raise CompileError("its pattern calls nothing that could be found", "let it call an operation")
        for node in structure.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise CompileError(f"its pattern holds a tensor of its own, {node.name}", "make it an argument")
        names = names_of(pattern, len(example))
        tensors = [name for name, each in zip(names, example, strict=True) if isinstance(each, Tensor)]
        for name, node in zip(tensors, inputs, strict=True):
            if not any(computes(user) for user in node.users):
                raise CompileError(f"its pattern does not read its argument {name}", "leave the argument out")
            if node in outputs_of(structure):
                raise CompileError(f"its pattern returns its argument {name}", "return only what it computes")

    def _checked(self, bound: Binding, node: fx.Node) -> Match:
        inside = dict.fromkeys(bound[part] for part in self._calls)
        outputs = tuple(bound[end] for end in self._ends)
        if any(bound[each] in inside for each in self._inputs):
            raise NearMiss(node, "it reads what lies inside of it")
        arguments = self._settle(bound, node)
        for found in inside:
            strangers = [user.name for user in found.users if user not in inside]
            if strangers and found not in outputs:
                raise NearMiss(node, f"{found.name} has another reader, {strangers[0]}")
        return Match(arguments, tuple(inside), outputs)

    def _but_for(self, node: fx.Node) -> NearMiss | None:
        """What keeps a pattern away that would be there but for a cast, or a write in place."""
        met: list[fx.Node] = []
        for start in bind(self.anchor, node, {}, met):
            for _ in self._completed(start, met):
                for each in met:
                    if each.target in IN_PLACE:
                        return NearMiss(node, f"{each.name} writes in place what others see")
                    return NearMiss(node, f"{each.name} changes the dtype to {value(each).dtype}")
            met.clear()
        return None

    def _completed(self, bound: Binding, met: list[fx.Node] | None = None) -> Iterator[Binding]:
        """Bind what the anchor does not read, such as other outputs: it is among the readers of what is bound."""
        missing = [part for part in self._calls if part not in bound]
        if not missing:
            yield bound
            return
        known = [(part, read) for part in missing for read in part.all_input_nodes if read in bound]
        if known:
            part, read = min(known, key=lambda each: len(bound[each[1]].users))
            for user in list(bound[read].users):
                for more in bind(part, user, bound, met):
                    yield from self._completed(more, met)

    def _settle(self, bound: Binding, place: fx.Node) -> tuple[Any, ...]:
        """The pattern's arguments, its numbers among them, for which all of it is equal."""
        inputs = iter([bound[part] for part in self._inputs])
        fixed = [next(inputs) if isinstance(each, Tensor) else each for each in self._example]
        numbers = [index for index, each in enumerate(self._example) if not isinstance(each, Tensor)]
        seen = list(numbers_of(bound))
        choices = [_choices(self._example[index], seen) for index in numbers]
        failures: list[Exception] = []
        traced: list[fx.Node] | None = None
        for chosen in itertools.islice(itertools.product(*choices), MOST_TRIED):
            arguments = list(fixed)
            for index, number in zip(numbers, chosen, strict=True):
                arguments[index] = number
            again = self._traced([value(each) for each in arguments])
            if isinstance(again, Exception):
                failures.append(again)
            elif self._equal(again, bound):
                return tuple(arguments)
            else:
                traced = traced or again
        if failures and traced is None:
            raise NearMiss(place, f"the pattern cannot be made of what is there: {str(failures[0]).splitlines()[0]}")
        differing = self._difference(traced or [], bound)
        raise NearMiss(place, f"its shapes or numbers are not those of the pattern{differing}")

    def _traced(self, values: list[Any]) -> list[fx.Node] | Exception:
        key = signature(values)
        if key not in self._traces:
            quiet, _SAYS.disabled = _SAYS.disabled, True
            try:
                graph = trace_pattern(self._pattern, values, self._mode)
                self._traces[key] = [node for node in graph.nodes if node.op == "placeholder" or computes(node)]
            except Exception as error:  # numbers for which the pattern has no meaning
                self._traces[key] = error
            finally:
                _SAYS.disabled = quiet
        return self._traces[key]

    def _difference(self, again: list[fx.Node], bound: Binding) -> str:
        """Both values of the first thing in which a trace and the graph differ, calls before inputs."""
        parts = [*self._inputs, *self._calls]
        if [kind(node) for node in again] != [kind(node) for node in parts]:
            return ""
        pairs = list(zip(again, (bound[part] for part in parts), strict=True))
        first = len(self._inputs)
        said = (difference(node, found) for node, found in (*pairs[first:], *pairs[:first]))
        return next((f": {each}" for each in said if each is not None), "")

    def _equal(self, again: list[fx.Node], bound: Binding) -> bool:
        parts = [*self._inputs, *self._calls]
        if [kind(node) for node in again] != [kind(node) for node in parts]:
            return False
        places = {node: bound[part] for node, part in zip(again, parts, strict=True)}
        return all(same(node, found, places) for node, found in places.items())


def _choices(given: Any, seen: list[tuple[Any, Any]]) -> list[Any]:
    """What a number of the pattern may be in the graph: what is in its places, as a number of its type."""
    found = [number_like(given, other) for example, other in seen if is_same_number(example, given)]
    return list({number_key(each): each for each in found if each is not None}.values()) or [given]
