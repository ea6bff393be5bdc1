"""Tests of how ranks share an axis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import ConfigError
from hal.nn import Share


@given(units=st.integers(1, 40), unit=st.integers(1, 128), ranks=st.integers(1, 16))
def test_equal_parts_cover_the_axis(units: int, unit: int, ranks: int) -> None:
    share, total = Share(unit), units * unit * ranks
    parts = [share.interval(total, rank, ranks) for rank in range(ranks)]
    assert [stop - start for start, stop in parts] == [share.size(total, ranks)] * ranks
    assert [start for start, _ in parts] == [0, *[stop for _, stop in parts][:-1]]
    assert parts[-1][1] == total


@given(total=st.integers(1, 1000), ranks=st.integers(1, 16))
def test_padded_parts_cover_the_axis(total: int, ranks: int) -> None:
    share = Share(pad=True)
    parts = [share.interval(total, rank, ranks) for rank in range(ranks)]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(total))
    assert all(stop - start <= share.size(total, ranks) for start, stop in parts)
    assert share.size(total, ranks) * ranks < total + ranks


@given(heads=st.integers(1, 8), factor=st.integers(1, 8))
def test_more_ranks_than_heads_repeat_them(heads: int, factor: int) -> None:
    share, ranks = Share(4, repeat=True), heads * factor
    starts = [share.interval(heads * 4, rank, ranks) for rank in range(ranks)]
    assert starts == [(head * 4, head * 4 + 4) for head in range(heads) for _ in range(factor)]


@pytest.mark.parametrize(
    ("share", "total", "ranks", "message"),
    [
        (Share(), 10, 4, "4 ranks cannot share 10 elements equally\n.*, or parallel.tensor, .*: 1, 2, 5, 10$"),
        (Share(8), 24, 2, "2 ranks cannot share 3 heads of 8 elements equally\n.*divisor of 3: 1, 3$"),
        (Share(8), 16, 4, "4 ranks cannot share 2 heads"),
        (Share(8, repeat=True), 24, 4, "4 ranks cannot share 3 heads"),
    ],
)
def test_what_cannot_be_shared(share: Share, total: int, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share.size(total, ranks)
