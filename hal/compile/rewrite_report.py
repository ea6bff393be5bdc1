"""Reports of the passes applied to a graph.

The reasons why a rewrite was not applied come from rewrite/: match.py and node_match.py compare the structure, and
apply_rewrite.py checks constraints, ``when``, memory and order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import attrs


@attrs.frozen
class PassReport:
    """The report of one pass.

    Attributes:
        name: of the rewrite or function.
        matches: the sites of a rewrite, as the names of the inserted nodes.
        near_misses: the sites that match a rewrite's structure but were skipped, with the reasons.
        seconds: the duration.
        changes: the number of changes that a function returned, or None.
        declined: those of ``near_misses`` that an optional rewrite's ``when`` skipped.
    """

    name: str
    matches: tuple[str, ...]
    near_misses: tuple[str, ...]
    seconds: float
    changes: int | None = None
    declined: frozenset[str] = frozenset()

    @property
    def reasons(self) -> Counter[str]:
        """The reasons for skipped sites, with the number of sites."""
        return _reasons(self.near_misses)

    def unexpected(self, wanted: Collection[str]) -> tuple[str, ...]:
        """Return the near misses that need a warning: all if the rewrite is wanted, otherwise the undeclined ones."""
        return tuple(each for each in self.near_misses if self.name in wanted or each not in self.declined)


def _reasons(misses: Collection[str]) -> Counter[str]:
    return Counter(miss.partition(": ")[2] for miss in misses)


@attrs.frozen
class Report:
    """The reports of all passes, in order."""

    passes: tuple[PassReport, ...]

    def __getitem__(self, name: str) -> PassReport:
        return next(each for each in self.passes if each.name == name)

    def below_expected(self, expected: Mapping[str, int]) -> list[str]:
        """Return a warning, with the reasons, for each rewrite that was applied less often than expected."""
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
                why = ["no such pass ran"]
            found = "; ".join(why) or "its pattern is not in the graph"
            warnings.append(f"{name} was applied at {applied[name]} sites, expected {count}: {found}")
        return warnings

    def missed(self, wanted: Collection[str] = ()) -> list[str]:
        """Return a warning, with the reasons, for each rewrite that was skipped at a matching site.

        This covers rewrites that only some layers of a model accept. A rewrite whose structure is not in the graph gets
        a warning only if it is wanted, because most models have no site for most rewrites. So does an optional rewrite
        whose ``when`` declined the sites.

        Args:
            wanted: names of rewrites that the configuration enables explicitly.
        """
        warnings = []
        for each in self.passes:
            misses = each.unexpected(wanted)
            why = "; ".join(f"{reason} ({times} times)" for reason, times in _reasons(misses).most_common(3))
            if misses and each.matches:
                times = f"at {len(each.matches)} sites, skipped at {len(misses)} matching sites"
                warnings.append(f"the rewrite {each.name} was applied {times}: {why}")
            elif misses:
                warnings.append(f"the rewrite {each.name} was applied nowhere: {why}")
            elif each.name in wanted and not each.matches:
                warnings.append(
                    f"the rewrite {each.name} is enabled but was applied nowhere: after the previous passes, its "
                    "structure is not in the graph"
                )
        return warnings

    def __str__(self) -> str:
        lines = []
        for each in self.passes:
            count = len(each.matches) if each.changes is None else each.changes
            lines.append(f"{each.name}: applied at {count} sites, {each.seconds * 1e3:.1f} ms")
            lines += [f"  skipped at {times} sites: {reason}" for reason, times in each.reasons.most_common(3)]
        return "\n".join(lines)
