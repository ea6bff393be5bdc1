"""Replacement of matches in a graph, such that every reader reads the same values as before."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.fx.alias_analysis import AliasAnalysis, may_overlap, written
from hal.compile.fx.normalize import same_shape, value
from hal.compile.rewrite.match import Match, Matcher, NearMiss
from hal.compile.rewrite.pattern import copy_calls, signature, trace_function
from hal.compile.rewrite.proof_samples import as_list, check_same_results
from hal.compile.rewrite.rewrite import Rewrite, prepare
from hal.compile.rewrite_report import PassReport
from hal.errors import CompileError

KEPT = ("stack_trace", "nn_module_stack")
"""The metadata that a replacement copies from the last node that it replaces."""


class RewriteApplication:
    """The application of one rewrite to one graph."""

    def __init__(self, rewrite: Rewrite, graph: fx.GraphModule, mode: FakeTensorMode) -> None:
        self._rewrite, self._graph, self._mode = rewrite, graph.graph, mode
        self._forms = [Matcher(rewrite.pattern, form.example, mode, form.structure) for form in prepare(rewrite)]
        self._memory: AliasAnalysis | None = None
        self._fakes: dict[Any, Any] = {}
        self._declined: set[str] = set()

    def run(self) -> PassReport:
        start = time.perf_counter()
        with _no_guards(self._mode):
            applied, missed = self._everywhere()
        return PassReport(
            self._rewrite.name,
            tuple(applied),
            tuple(missed),
            time.perf_counter() - start,
            declined=frozenset(self._declined.intersection(missed)),
        )

    def _everywhere(self) -> tuple[list[str], list[str]]:
        applied: list[str] = []
        gone: set[fx.Node] = set()
        left = list(self._graph.nodes)
        while True:  # Repeat while sites were skipped: a later application may have enabled them.
            count, missed = len(applied), dict[fx.Node, str]()
            for matcher in self._forms:  # In order, because one form may be a part of the form before.
                for node in left:
                    if node in gone:
                        continue
                    try:
                        match, name = self._at(node, matcher)
                    except NearMiss as miss:
                        missed.setdefault(node, str(miss))
                        if miss.declined:
                            self._declined.add(str(miss))
                        continue
                    if match is not None:
                        applied.append(name)
                        gone.update(match.nodes)
            left = [node for node in missed if node not in gone]
            if len(applied) == count or not left:
                return applied, [missed[node] for node in left]

    def _at(self, node: fx.Node, matcher: Matcher) -> tuple[Match | None, str]:
        """Apply the rewrite at a node if its pattern matches."""
        try:
            match = matcher.at(node)
            return match, "" if match is None else self._replace(match, node)
        except (NearMiss, CompileError):
            raise
        except Exception as error:
            raise CompileError(
                f"the rewrite {self._rewrite.name} failed at {node.format_node()}: {type(error).__name__}: {error}",
                "correct the rewrite, or disable it",
            ) from error

    def _replace(self, match: Match, node: fx.Node) -> str:
        values = [value(each) for each in match.arguments]
        try:
            unmet = self._rewrite.constraints.unmet(values)
            reason = self._rewrite.when(*values) if unmet is None else unmet
        except RuntimeError as error:
            if type(error).__name__ != "_ShapeEnvGuardError":
                raise
            raise NearMiss(node, f"`when` depends on a size that is symbolic here: {error}") from None
        if reason is not None:
            raise NearMiss(node, reason, declined=unmet is None and self._rewrite.optional)
        if self._memory is None:
            self._memory = AliasAnalysis(self._graph)
        place = _place_of(match, node, self._memory)
        with self._graph.inserting_before(place):
            made, results = self._put(match, values)
        kept = {name: node.meta[name] for name in KEPT if name in node.meta}
        for each in made:
            each.meta.update(kept)
            self._memory.add(each)
        inside = set(match.nodes)
        for output, result in zip(match.outputs, results, strict=True):
            output.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
            self._memory.take_over(output, result)
        for each in [each for each in made if each.target is operator.getitem and not each.users]:
            self._memory.drop(each)
            self._graph.erase_node(each)
        for each in sorted(inside, reverse=True):
            self._memory.drop(each)
            self._graph.erase_node(each)
        return made[0].name

    def _put(self, match: Match, values: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Insert the replacement. Return its nodes, and those of them that are its results."""
        replacement = self._rewrite.replacement
        if not isinstance(replacement, torch._ops.OpOverload):
            return self._put_function(match, values)
        made = [self._graph.call_function(replacement, match.arguments)]
        known = self._fake(values)
        self._check_same_results(match, as_list(known))
        pairs = zip(match.outputs, as_list(known), strict=True)
        fakes = [value(output) if self._is_new(output, fake) else self._empty_like(fake) for output, fake in pairs]
        if not isinstance(known, (tuple, list)):
            made[0].meta["val"] = fakes[0] if fakes else None
            return made, made[: len(fakes)]
        made[0].meta["val"] = type(known)(fakes)
        for index, each in enumerate(fakes):
            made.append(self._graph.call_function(operator.getitem, (made[0], index)))
            made[-1].meta["val"] = each
        return made, made[1:]

    def _put_function(self, match: Match, values: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
        traced = trace_function(self._rewrite.replacement, values, self._mode).graph
        tensors = [each for each in match.arguments if isinstance(each, fx.Node)]
        made, results = copy_calls(traced, self._graph, tensors)
        self._check_same_results(match, [value(each) for each in results])
        return made, results

    def _check_same_results(self, match: Match, given: Sequence[Any]) -> None:
        try:
            check_same_results(given, [value(each) for each in match.outputs])
        except CompileError as error:
            names = ", ".join(each.name for each in match.outputs)
            raise CompileError(
                f"the rewrite {self._rewrite.name} cannot be used at {names}: {error.problem}", error.remedy
            ) from None

    def _fake(self, values: Sequence[Any]) -> Any:
        """Return the replacement's fake results, cached by the signature of the arguments."""
        key = signature(values)
        if key not in self._fakes:
            with torch.inference_mode(False), torch.no_grad(), self._mode:
                self._fakes[key] = self._rewrite.replacement(*values)
        return self._fakes[key]

    def _is_new(self, output: fx.Node, fake: Tensor) -> bool:
        """Return whether the fake tensor of a pattern's output is valid for the replacement's result."""
        made = [self._memory.made_by(place) for place in self._memory.places(output)] if self._memory else []
        return made == [output] and same_shape(value(output).stride(), fake.stride())

    def _empty_like(self, fake: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad(), self._mode:
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)


def _no_guards(mode: FakeTensorMode) -> AbstractContextManager[None]:
    """Make decisions that depend on a symbolic size raise: the graph must be valid for every size."""
    forbid: Callable[[], AbstractContextManager[None]] = getattr(mode.shape_env, "error_on_new_guards", nullcontext)
    return forbid()


def _place_of(match: Match, node: fx.Node, memory: AliasAnalysis) -> fx.Node:
    """Return the node before which the replacement is inserted: the first reader of an output, or the end of the match.

    Raises:
        NearMiss: no such node exists: a matched node would have to move across a write to what it reads or across a
            reader of what it writes, or an output is a view of memory that is written.
    """
    inside = set(match.nodes)
    ordered = sorted(inside)
    first, last = ordered[0], ordered[-1]
    place = last.next
    for output in match.outputs:
        for user in output.users:
            if user not in inside and user < place:
                place = user
    for argument in match.arguments:
        if isinstance(argument, fx.Node) and not argument < place:
            raise NearMiss(node, f"{place.name} reads an output before its argument {argument.name} is computed")
    if (reason := memory.between(first, last, inside)) is not None:
        raise NearMiss(node, reason)
    _keep_order(match, node, memory)
    _keep_apart(match, node, memory)
    for output in match.outputs:
        _keep_views(output, match, node, memory, first)
    return place


def _keep_order(match: Match, node: fx.Node, memory: AliasAnalysis) -> None:
    """Raise NearMiss unless the writes of matched nodes have the same order as in the pattern."""
    for index, writer in enumerate(match.nodes):
        for target in written(writer):
            for other_index, other in enumerate(match.nodes):
                if other_index != index and (other_index < index) != (other < writer):
                    for read in other.all_input_nodes:
                        if _may_share(read, target, memory):
                            raise NearMiss(node, f"{other.name} and {writer.name} are in another order")


def _keep_apart(match: Match, node: fx.Node, memory: AliasAnalysis) -> None:
    """Raise NearMiss if an argument that the pattern writes shares memory with another argument."""
    targets = [target for each in match.nodes for target in written(each)]
    given = [each for each in match.arguments if isinstance(each, fx.Node)]
    for index, one in enumerate(given):
        if any(_may_share(one, target, memory) for target in targets):
            for other in given[:index] + given[index + 1 :]:
                if _may_share(one, other, memory):
                    raise NearMiss(node, f"{one.name}, which it writes, shares memory with its argument {other.name}")


def _keep_views(output: fx.Node, match: Match, node: fx.Node, memory: AliasAnalysis, first: fx.Node) -> None:
    """Raise NearMiss if an output is a view and its replacement, in new memory, would be distinguishable."""
    inside = set(match.nodes)
    for place in memory.places(output):
        shared = [each.name for each in match.outputs if each is not output and place in memory.places(each)]
        if memory.made_by(place) in inside and not shared:
            continue
        for writer in memory.writers(output):
            if writer > first:
                raise NearMiss(node, f"{writer.name} writes to memory that {output.name} is a view of")
        returned = memory.returned.get(place, [])
        if returned and (memory.is_input(place) or len(set(returned)) > 1):
            raise NearMiss(node, f"{output.name} is a view, and the graph returns another of the same memory")


def _may_share(one: fx.Node, other: fx.Node, memory: AliasAnalysis) -> bool:
    if one is other:
        return True
    return not set(memory.places(one)).isdisjoint(memory.places(other)) and may_overlap(one, other)
