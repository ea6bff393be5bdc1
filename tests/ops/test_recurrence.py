"""Tests of the references of the gated delta rules that no sample of them makes, and of composed kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import hal
from hal import ops
from hal.ops.kernels.composed_recurrence import KERNELS

LENGTHS = (3, 70, 1, 5)
RULES = ("gated_delta_rule", "channel_delta_rule")


def drawn(seed: int, rule: str) -> dict[str, Tensor]:
    """Draw a step of sequences. ``state`` has a slot for each, after the dummy slot."""
    draw = torch.Generator().manual_seed(seed)
    tokens, by_channel = sum(LENGTHS), rule == "channel_delta_rule"
    heads = 4 if by_channel else 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return {
        "query": functional.normalize(normal(tokens, heads, 8), dim=-1),
        "key": functional.normalize(normal(tokens, heads, 8), dim=-1),
        "value": normal(tokens, 4, 16),
        "decay": -normal(tokens, 4, *([8] if by_channel else [])).abs(),
        "beta": normal(tokens, 4).sigmoid(),
        "state": normal(len(LENGTHS) + 1, 4, 16, 8),
    }


def run(rule: Callable[..., Tensor], given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    state = given["state"].clone()
    slots = torch.arange(1, len(LENGTHS) + 1, dtype=torch.int32)
    steps = {"read_slots": slots, "write_slots": None, "query_start_loc": starts, "query_start_loc_host": starts}
    return rule(**{**given, "state": state}, **steps, scale=0.5), state


@pytest.mark.parametrize("kernel", ["reference", "composed", "cpu"])
@pytest.mark.parametrize("rule", RULES)
def test_each_token_changes_the_state_of_the_tokens_before_it(rule: str, kernel: str, cpu: hal.Backend) -> None:
    """Against the definition of the rule, token by token in float64."""
    kernels = {"reference": ops.operation(rule).reference, "composed": KERNELS[rule], "cpu": cpu.kernels[rule]}
    given = drawn(7, rule)
    found, states = run(kernels[kernel], given)
    query, key, value, decay, beta, state = (each.double() for each in given.values())
    query, key = (each.repeat_interleave(4 // each.shape[1], 1) for each in (query, key))
    wanted, token = torch.empty_like(value), 0
    for slot, length in enumerate(LENGTHS, 1):
        held = state[slot]
        for at in range(token, token + length):
            held = held * (decay[at].exp().unsqueeze(1) if decay.dim() == 3 else decay[at].exp()[:, None, None])
            known = (held @ key[at].unsqueeze(-1)).squeeze(-1)
            held = held + (beta[at].unsqueeze(-1) * (value[at] - known)).unsqueeze(-1) * key[at].unsqueeze(1)
            wanted[at] = 0.5 * (held @ query[at].unsqueeze(-1)).squeeze(-1)
        state[slot], token = held, token + length
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.double(), state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["query", "key", "value", "decay", "beta", "state"])
@pytest.mark.parametrize("bad", range(len(LENGTHS)))
def test_a_nan_of_a_sequence_stays_there(rule: str, name: str, bad: int) -> None:
    given, reference = drawn(1, rule), ops.operation(rule).reference
    expected, states = run(reference, given)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    at = bad + 1 if name == "state" else int(starts[bad])
    given[name][at].fill_(float("nan"))
    found, after = run(reference, given)
    others = torch.ones(len(expected), dtype=torch.bool)
    others[starts[bad] : starts[bad + 1]] = False
    assert found[~others].isnan().any()
    # Products of zeros in the place of the others round alike.
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-6)
    kept = [row for row in range(len(states)) if row != bad + 1]
    assert after[bad + 1].isnan().all()
    torch.testing.assert_close(after[kept], states[kept], rtol=1e-5, atol=1e-6)
