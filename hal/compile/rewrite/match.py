"""Pattern matching in a graph.

Matching has two steps. The first compares structure only: it walks from the end of the pattern to its inputs and binds
each pattern node to a graph node. The numbers on the way give the pattern's own numbers, such as an epsilon or a count
of heads. The second step traces the pattern again with the bound arguments and compares everything. Sites that are
alike, such as the layers of a model, share a trace, so the cost is linear in the number of sites.
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
from hal.compile.fx.normalize import IN_PLACE, VIEWS, mutates, value
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
"""The most combinations of numbers that are tried for a pattern."""

_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger of errors on fake tensors, which attempts to trace may cause."""


@attrs.frozen(eq=False)
class Match:
    """A site that matches a pattern.

    Attributes:
        arguments: the pattern's arguments, in order: nodes and numbers.
        nodes: the matched graph nodes, in the order of the pattern's calls.
        outputs: the matched nodes that the pattern returns.
    """

    arguments: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class NearMiss(Exception):
    """A site matches the structure of a pattern, but does not meet another condition.

    Attributes:
        place: the end of the site.
        reason: the condition that it does not meet.
        declined: whether the condition is that of an optional rewrite.
    """

    def __init__(self, place: fx.Node, reason: str, *, declined: bool = False) -> None:
        super().__init__(f"at {place.name}: {reason}")
        self.place, self.reason, self.declined = place, reason, declined


class Matcher:
    """Matches one pattern in graphs of one trace.

    Args:
        pattern: a function of tensors and numbers.
        example: arguments that determine its structure.
        mode: the mode of the graphs' fake tensors.
        structure: the pattern's trace with the example, if available.

    Raises:
        CompileError: the pattern cannot be matched.
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
        # The search starts at the node, a write or an output, that depends on most of the pattern.
        self.anchor = max(effects or self._ends, key=lambda end: len(reach(end)))
        while self.anchor.target is operator.getitem or self.anchor.target in VIEWS:
            self.anchor = self.anchor.all_input_nodes[0]

    def at(self, node: fx.Node) -> Match | None:
        """Return the match whose end is ``node``, or None.

        Raises:
            NearMiss: the structure matches, but numbers differ, or another node reads an inner value.
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
            miss = self._explain_miss(node)
        if miss is not None:
            raise miss
        return None

    @staticmethod
    def check(pattern: Callable[..., Any], example: Sequence[Any], structure: fx.Graph) -> None:
        """Raise CompileError unless a pattern, with its trace for the example, can be matched."""
        inputs = [node for node in structure.nodes if node.op == "placeholder"]
        calls = [node for node in structure.nodes if computes(node)]
        if all(node.target is operator.getitem or node.target in VIEWS for node in calls):
            raise CompileError("its pattern calls no operation that could be matched", "let it call an operation")
        for node in structure.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise CompileError(f"its pattern contains a constant tensor, {node.name}", "make it an argument")
        names = names_of(pattern, len(example))
        tensors = [name for name, each in zip(names, example, strict=True) if isinstance(each, Tensor)]
        for name, node in zip(tensors, inputs, strict=True):
            if not any(computes(user) for user in node.users):
                raise CompileError(f"its pattern does not read its argument {name}", "remove the argument")
            if node in outputs_of(structure):
                raise CompileError(f"its pattern returns its argument {name}", "return only computed tensors")

    def _checked(self, bound: Binding, node: fx.Node) -> Match:
        inside = dict.fromkeys(bound[part] for part in self._calls)
        outputs = tuple(bound[end] for end in self._ends)
        if any(bound[each] in inside for each in self._inputs):
            raise NearMiss(node, "it reads a value that it computes itself")
        arguments = self._settle(bound, node)
        for found in inside:
            strangers = [user.name for user in found.users if user not in inside]
            if strangers and found not in outputs:
                raise NearMiss(node, f"{found.name} has another reader, {strangers[0]}")
        return Match(arguments, tuple(inside), outputs)

    def _explain_miss(self, node: fx.Node) -> NearMiss | None:
        """Return the near miss of a pattern that would match without a cast or an in-place write, or None."""
        met: list[fx.Node] = []
        for start in bind(self.anchor, node, {}, met):
            for _ in self._completed(start, met):
                for each in met:
                    if each.target in IN_PLACE:
                        return NearMiss(node, f"{each.name} writes in place to memory that others read")
                    return NearMiss(node, f"{each.name} changes the dtype to {value(each).dtype}")
            met.clear()
        return None

    def _completed(self, bound: Binding, met: list[fx.Node] | None = None) -> Iterator[Binding]:
        """Bind the nodes that the anchor does not depend on, such as other outputs, through readers of bound nodes."""
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
        """Return the pattern's arguments, with numbers for which its trace equals the matched nodes."""
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
            raise NearMiss(place, f"the pattern cannot be traced here: {str(failures[0]).splitlines()[0]}")
        differing = self._difference(traced or [], bound)
        raise NearMiss(place, f"its shapes or numbers are not those of the pattern{differing}")

    def _traced(self, values: list[Any]) -> list[fx.Node] | Exception:
        key = signature(values)
        if key not in self._traces:
            quiet, _FAKE_TENSOR_LOG.disabled = _FAKE_TENSOR_LOG.disabled, True
            try:
                graph = trace_pattern(self._pattern, values, self._mode)
                self._traces[key] = [node for node in graph.nodes if node.op == "placeholder" or computes(node)]
            except Exception as error:  # The pattern may be invalid for these numbers.
                self._traces[key] = error
            finally:
                _FAKE_TENSOR_LOG.disabled = quiet
        return self._traces[key]

    def _difference(self, again: list[fx.Node], bound: Binding) -> str:
        """Describe the first difference between a trace and the graph, in calls before inputs."""
        parts = [*self._inputs, *self._calls]
        if [kind(node) for node in again] != [kind(node) for node in parts]:
            return ""
        pairs = list(zip(again, (bound[part] for part in parts), strict=True))
        first = len(self._inputs)
        differences = (difference(node, found) for node, found in (*pairs[first:], *pairs[:first]))
        return next((f": {each}" for each in differences if each is not None), "")

    def _equal(self, again: list[fx.Node], bound: Binding) -> bool:
        parts = [*self._inputs, *self._calls]
        if [kind(node) for node in again] != [kind(node) for node in parts]:
            return False
        places = {node: bound[part] for node, part in zip(again, parts, strict=True)}
        return all(same(node, found, places) for node, found in places.items())


def _choices(given: Any, seen: list[tuple[Any, Any]]) -> list[Any]:
    """Return the candidates for a number of the pattern: the graph's numbers in its positions, in its type."""
    found = [number_like(given, other) for example, other in seen if is_same_number(example, given)]
    return list({number_key(each): each for each in found if each is not None}.values()) or [given]
