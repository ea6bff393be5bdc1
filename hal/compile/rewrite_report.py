"""What passes did to a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

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
            expected: how often, by name; None for what was given to :meth:`hal.compile.pass_manager.PassManager.apply`.
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

    def missed(self, wanted: Collection[str] = ()) -> list[str]:
        """A warning for every rewrite that was not applied at a place with its structure, with the reasons.

        So one that some layers of a model have and others lack is a warning, and one that suits none of them. One whose
        structure is nowhere is a warning only if it is wanted: most models have no place for most rewrites.

        Args:
            wanted: names of rewrites that somebody asked for.
        """
        warnings = []
        for each in self.passes:
            why = "; ".join(f"{reason} ({times} times)" for reason, times in each.reasons.most_common(3))
            if each.near_misses and each.matches:
                times = f"{len(each.matches)} times and left out {len(each.near_misses)} times where its structure is"
                warnings.append(f"the rewrite {each.name} was applied {times}: {why}")
            elif each.near_misses:
                warnings.append(f"the rewrite {each.name} was applied nowhere: {why}")
            elif each.name in wanted and not each.matches:
                warnings.append(
                    f"the rewrite {each.name} was asked for and applied nowhere: its structure is not in the graph, as "
                    "the passes before it left it"
                )
        return warnings

    def __str__(self) -> str:
        lines = []
        for each in self.passes:
            count = len(each.matches) if each.changes is None else each.changes
            of_expected = "" if each.expected is None else f" of {each.expected} expected"
            lines.append(f"{each.name}: {count} applied{of_expected}, {each.seconds * 1e3:.1f} ms")
            lines += [f"  not applied {times} times: {reason}" for reason, times in each.reasons.most_common(3)]
        return "\n".join(lines)
