"""The cache groups of a model: the layers that share a block table, or the slots of sequences."""

from __future__ import annotations

import attrs

from hal.step.page_layout import PageLayout


@attrs.frozen
class CacheGroups:
    """The cache groups of a model. Groups of layers with states per token, and per sequence, are numbered apart.

    Attributes:
        layers: the layers of each group, in order. A layer without states is in none.
        per_token: whether each group's layers keep states per token.
        layout: the layout of the pages.
        num_pages: the number of pages, including the dummy page.
    """

    layers: tuple[tuple[int, ...], ...]
    per_token: tuple[bool, ...]
    layout: PageLayout
    num_pages: int

    def number(self, group: int) -> int:
        """Return the number of a group among those of its kind."""
        return self.per_token[:group].count(self.per_token[group])

    @property
    def num_tables(self) -> int:
        """The number of groups of layers with states per token."""
        return sum(self.per_token)

    @property
    def num_slots(self) -> int:
        """The number of groups of layers with states per sequence."""
        return len(self.per_token) - self.num_tables
