"""Tests of the reference of the gated delta rule that no sample of it makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hal import ops

LENGTHS = (3, 70, 1, 5)
RULE = ops.operation("gated_delta_rule").reference


def drawn(seed: int) -> dict[str, Tensor]:
    """Draw a step of sequences. ``state`` has a slot for each, after the dummy slot."""
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return {
        "query": functional.normalize(normal(tokens, 2, 8), dim=-1),
        "key": functional.normalize(normal(tokens, 2, 8), dim=-1),
        "value": normal(tokens, 4, 16),
        "decay": -normal(tokens, 4).abs(),
        "beta": normal(tokens, 4).sigmoid(),
        "state": normal(len(LENGTHS) + 1, 4, 16, 8),
    }


def run(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    state = given["state"].clone()
    slots = torch.arange(1, len(LENGTHS) + 1, dtype=torch.int32)
    steps = {"read_slots": slots, "write_slots": None, "query_start_loc": starts, "query_start_loc_host": starts}
    return RULE(**{**given, "state": state}, **steps, scale=0.5), state


@pytest.mark.parametrize("name", ["query", "key", "value", "decay", "beta", "state"])
@pytest.mark.parametrize("bad", range(len(LENGTHS)))
def test_a_nan_of_a_sequence_stays_there(name: str, bad: int) -> None:
    given = drawn(1)
    expected, states = run(given)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    at = bad + 1 if name == "state" else int(starts[bad])
    given[name][at].fill_(float("nan"))
    found, after = run(given)
    others = torch.ones(len(expected), dtype=torch.bool)
    others[starts[bad] : starts[bad + 1]] = False
    assert found[~others].isnan().any()
    # Products of zeros in the place of the others round alike.
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-6)
    kept = [row for row in range(len(states)) if row != bad + 1]
    assert after[bad + 1].isnan().all()
    torch.testing.assert_close(after[kept], states[kept], rtol=1e-5, atol=1e-6)
