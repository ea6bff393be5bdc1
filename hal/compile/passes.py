"""The pass manager: rewrites and functions, applied to a traced graph in order, and a report of what each did."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.match import Match, Matcher, NearMiss
from hal.compile.normalise import mutates, normalise, same_shape, value
from hal.compile.rewrite import Rewrite, example
from hal.errors import CompileError

Pass = Callable[..., Any]


@attrs.frozen
class PassReport:
    """What one pass did.

    Attributes:
        name: the rewrite's, or the function's.
        matches: where a rewrite was applied: the names of the nodes that it put in.
        near_misses: places where a rewrite's structure was found, and why it was not applied.
        seconds: that it took.
    """

    name: str
    matches: tuple[str, ...]
    near_misses: tuple[str, ...]
    seconds: float


@attrs.frozen
class Report:
    """What all passes did, in their order."""

    passes: tuple[PassReport, ...]

    def __getitem__(self, name: str) -> PassReport:
        return next(each for each in self.passes if each.name == name)

    def __str__(self) -> str:
        lines = []
        for each in self.passes:
            lines.append(f"{each.name}: {len(each.matches)} applied, {each.seconds * 1e3:.1f} ms")
            reasons = Counter(miss.partition(": ")[2] for miss in each.near_misses)
            lines += [f"  not applied {count} times: {reason}" for reason, count in reasons.most_common(3)]
        return "\n".join(lines)


class PassManager:
    """Applies passes to a graph.

    Args:
        graph: of overloads, with fake tensors as ``meta["val"]``; changed in place.
        mode: whose fake tensors they are.
    """

    def __init__(self, graph: fx.GraphModule, mode: FakeTensorMode) -> None:
        self._graph, self._mode = graph, mode
        self._passes: list[tuple[str, Callable[[], PassReport]]] = []

    def add(self, which: Rewrite | Pass, **options: Any) -> PassManager:
        """Add a rewrite, or a function of a GraphModule, which is called with ``options``; returns this manager.

        Raises:
            CompileError: options were given for a rewrite, or it is neither.
        """
        if isinstance(which, Rewrite):
            if options:
                raise CompileError(
                    f"the rewrite {which.name} takes no options, and {', '.join(options)} were given", "leave them out"
                )
            self._passes.append((which.name, lambda: self._rewrite(which)))
        elif callable(which):
            name = getattr(which, "__name__", repr(which))
            self._passes.append((name, lambda: self._call(name, which, options)))
        else:
            raise CompileError(f"{which!r} is no pass", "give a Rewrite, or a function of a GraphModule")
        return self

    def apply(self) -> Report:
        """Apply all passes.

        Raises:
            CompileError: a pass raised, or a rewrite's replacement does not give what its pattern gave.
        """
        normalise(self._graph.graph)
        reports = [run() for _, run in self._passes]
        self._graph.graph.lint()
        self._graph.recompile()
        return Report(tuple(reports))

    def _call(self, name: str, function: Pass, options: dict[str, Any]) -> PassReport:
        start = time.perf_counter()
        try:
            function(self._graph, **options)
            self._graph.graph.lint()
        except Exception as error:
            raise CompileError(
                f"the pass {name} failed: {type(error).__name__}: {error}", "correct the pass, or leave it out"
            ) from error
        return PassReport(name, (), (), time.perf_counter() - start)

    def _rewrite(self, rewrite: Rewrite) -> PassReport:
        start, applied, missed = time.perf_counter(), [], []
        matcher = Matcher(rewrite.pattern, example(rewrite), self._mode)
        order = {node: place for place, node in enumerate(self._graph.graph.nodes)}
        writes = [node for node in self._graph.graph.nodes if mutates(node)]
        gone: set[fx.Node] = set()
        for node in list(self._graph.graph.nodes):
            if node in gone:
                continue
            try:
                match = matcher.at(node)
                if match is None:
                    continue
                values = [value(each) for each in match.arguments]
                if (reason := rewrite.when(*values)) is not None:
                    raise NearMiss(node, reason)
                last = _place(match, node, order, writes)
                applied.append(self._put(rewrite, match, last))
                gone.update(match.nodes)
            except NearMiss as miss:
                missed.append(str(miss))
        return PassReport(rewrite.name, tuple(applied), tuple(missed), time.perf_counter() - start)

    def _put(self, rewrite: Rewrite, match: Match, last: fx.Node) -> str:
        graph = self._graph.graph
        with graph.inserting_after(last):
            made = graph.call_function(rewrite.replacement, match.arguments)
        with self._mode:
            fake = rewrite.replacement(*(value(each) for each in match.arguments))
        made.meta["val"] = fake
        results = list(fake) if isinstance(fake, (tuple, list)) else [fake]
        _check(rewrite, match, results)
        place = made
        for index, (output, result) in enumerate(zip(match.outputs, results, strict=True)):
            node = made
            if isinstance(fake, (tuple, list)):
                with graph.inserting_after(place):
                    node = place = graph.call_function(operator.getitem, (made, index))
                node.meta["val"] = result
            output.replace_all_uses_with(node, delete_user_cb=lambda user: user not in match.nodes)
        for node in sorted(match.nodes, key=list(graph.nodes).index, reverse=True):
            graph.erase_node(node)
        return made.name


def _place(match: Match, node: fx.Node, order: dict[fx.Node, int], writes: list[fx.Node]) -> fx.Node:
    """After which node the replacement goes: the last of the matched, if nothing forbids to bring all of it there."""
    inside = set(match.nodes)
    last = max((each for each in inside if each in order), key=lambda each: order[each])
    first = min(order[each] for each in inside if each in order)
    for output in match.outputs:
        early = [user for user in output.users if user not in inside and order.get(user, len(order)) < order[last]]
        if early:
            raise NearMiss(node, f"{output.name} is read by {early[0].name} before all of the pattern has run")
    for write in writes:
        if write not in inside and first < order[write] < order[last]:
            raise NearMiss(node, f"{write.name} writes to memory in between")
    return last


def _check(rewrite: Rewrite, match: Match, results: list[Any]) -> None:
    expected = [value(each) for each in match.outputs]
    alike = len(results) == len(expected) and all(
        isinstance(one, Tensor) and one.dtype == other.dtype and same_shape(one.shape, other.shape)
        for one, other in zip(results, expected, strict=False)
    )
    if not alike:
        raise CompileError(
            f"the replacement of the rewrite {rewrite.name} gives {_shapes(results)}, and its pattern "
            f"{_shapes(expected)}",
            "make both give tensors of the same shapes and dtypes, in the same order",
        )


def _shapes(values: list[Any]) -> str:
    return ", ".join(f"{each.dtype}{list(each.shape)}" if isinstance(each, Tensor) else repr(each) for each in values)
