"""Tests of the gated delta rule of the emulated CANN, against the rule token by token in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

BF16, INT32 = torch.bfloat16, torch.int32
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, SLOTS = 2, 4, 16, 24, 12
SCALE = 0.25


def inputs(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key = (torch.nn.functional.normalize(normal(tokens, KEY_HEADS, KEY_DIM), dim=-1) for _ in range(2))
    return {
        "query": query.to(BF16),
        "key": key.to(BF16),
        "value": normal(tokens, HEADS, VALUE_DIM).to(BF16),
        "beta": torch.sigmoid(normal(tokens, HEADS)).to(BF16),
        "g": -torch.rand(tokens, HEADS, generator=generator),
        "state": normal(SLOTS, HEADS, VALUE_DIM, KEY_DIM).to(BF16),
    }


def advanced(given: dict[str, Tensor], state: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Return the state after a token, and its result, in float64."""
    query, key = (given[name][token].double().repeat_interleave(HEADS // KEY_HEADS, 0) for name in ("query", "key"))
    state = state * given["g"][token].double().exp()[:, None, None]
    known = torch.einsum("hvk,hk->hv", state, key)
    change = given["beta"][token].double()[:, None] * (given["value"][token].double() - known)
    state = state + change[:, :, None] * key[:, None, :]
    return state, SCALE * torch.einsum("hvk,hk->hv", state, query)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=INT32, device="npu")


def recurrent(given: dict[str, Tensor], **changes: Any) -> tuple[Tensor, Tensor]:
    """Run two sequences of 3 and 1 tokens; return the results and the states."""
    on = {name: each.npu() for name, each in given.items()}
    query, key, value, state = (on.pop(name) for name in ("query", "key", "value", "state"))
    arguments = {
        "scale": SCALE,
        "actual_seq_lengths": ints(3, 1),
        "ssm_state_indices": ints(5, 2, 7, 4),
        "num_accepted_tokens": ints(2, 1),
        **on,
        **changes,
    }
    return torch_npu.npu_recurrent_gated_delta_rule(query, key, value, state, **arguments).cpu(), state.cpu()


def test_few_tokens_start_from_the_accepted_one_and_write_a_slot_each() -> None:
    given = inputs(4)
    found, states = recurrent(given)
    expected = given["state"].clone()
    for first, start, slots in ((0, 2, (5, 2, 7)), (3, 4, (4,))):
        state = given["state"][start].double()
        for offset, slot in enumerate(slots):
            state, result = advanced(given, state, first + offset)
            torch.testing.assert_close(found[first + offset].double(), result, rtol=1e-2, atol=1e-2)
            expected[slot] = state.to(BF16)
    torch.testing.assert_close(states, expected, rtol=1e-2, atol=1e-2)


def test_chunks_start_from_the_given_states() -> None:
    given, lengths = inputs(70), (66, 4)
    on = {name: each.npu() for name, each in given.items()}
    found, states = torch_npu.npu_chunk_gated_delta_rule(
        on["query"],
        on["key"],
        on["value"],
        beta=on["beta"],
        initial_state=on["state"][:2].contiguous(),
        actual_seq_lengths=ints(*lengths),
        scale=SCALE,
        g=on["g"],
    )
    token = 0
    for row, length in enumerate(lengths):
        state = given["state"][row].double()
        for _ in range(length):
            state, result = advanced(given, state, token)
            torch.testing.assert_close(found[token].cpu().double(), result, rtol=2e-2, atol=2e-2)
            token += 1
        torch.testing.assert_close(states[row].cpu().double(), state, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": torch.ones(4, HEADS)}, "must be bfloat16"),
        ({"ssm_state_indices": torch.zeros(3, dtype=INT32)}, "ssm_state_indices must have shape [4]"),
        ({"num_accepted_tokens": torch.ones(3, dtype=INT32)}, "num_accepted_tokens must have shape [2]"),
        ({"g": torch.zeros(4, HEADS, dtype=BF16)}, "g must"),
    ],
)
def test_calls_that_the_documentation_excludes_are_refused(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        recurrent(inputs(4), **{name: each.npu() for name, each in changes.items()})


def test_a_state_in_float32_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must be bfloat16"):
        recurrent({**inputs(4), "state": torch.zeros(SLOTS, HEADS, VALUE_DIM, KEY_DIM)})
