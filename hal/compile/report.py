"""What passes did to a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs


@attrs.frozen
class PassReport:
    """What one pass did.

    Attributes:
        name: the rewrite's, or the function's.
        matches: where a rewrite was applied: the names of the nodes that it put in.
        near_misses: places where a rewrite's structure was found, and why it was not applied.
        seconds: that it took.
        expected: how often a rewrite was expected to be applied, if that was said.
        changes: how often a function says that it changed something; None if it says nothing.
    """

    name: str
    matches: tuple[str, ...]
    near_misses: tuple[str, ...]
    seconds: float
    expected: int | None = None
    changes: int | None = None

    @property
    def reasons(self) -> Counter[str]:
        """Why it was not applied, and at how many places."""
        return Counter(miss.partition(": ")[2] for miss in self.near_misses)


@attrs.frozen
class Report:
    """What all passes did, in their order."""

    passes: tuple[PassReport, ...]

    def __getitem__(self, name: str) -> PassReport:
        return next(each for each in self.passes if each.name == name)

    def unfired(self, expected: Mapping[str, int] | None = None) -> list[str]:
        """A warning for every rewrite that was applied less often than expected, with the reasons.

        Args:
            expected: how often, by name; None for what was given to :meth:`hal.compile.passes.PassManager.apply`.
        """
        if expected is None:
            expected = {each.name: each.expected for each in self.passes if each.expected is not None}
        applied: Counter[str] = Counter()
        reasons: dict[str, Counter[str]] = {}
        for each in self.passes:
            applied[each.name] += len(each.matches)
            reasons[each.name] = reasons.get(each.name, Counter()) + each.reasons
        warnings = []
        for name, count in expected.items():
            if applied[name] >= count:
                continue
            why = [f"{reason} ({times} times)" for reason, times in reasons.get(name, Counter()).most_common(3)]
            if name not in reasons:
                why = ["there is no such pass"]
            found = "; ".join(why) or "its pattern is nowhere in the graph"
            warnings.append(f"{name} was applied {applied[name]} times, and {count} were expected: {found}")
        return warnings

    def missed(self) -> list[str]:
        """A warning for every rewrite whose structure was found and that was applied nowhere, with the reasons."""
        return [
            f"the rewrite {each.name} was applied nowhere: "
            + "; ".join(f"{reason} ({times} times)" for reason, times in each.reasons.most_common(3))
            for each in self.passes
            if each.near_misses and not each.matches
        ]

    def __str__(self) -> str:
        lines = []
        for each in self.passes:
            count = len(each.matches) if each.changes is None else each.changes
            of_expected = "" if each.expected is None else f" of {each.expected} expected"
            lines.append(f"{each.name}: {count} applied{of_expected}, {each.seconds * 1e3:.1f} ms")
            lines += [f"  not applied {times} times: {reason}" for reason, times in each.reasons.most_common(3)]
        return "\n".join(lines)
