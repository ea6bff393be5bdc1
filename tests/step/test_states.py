"""Tests of states that groups of tokens share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.device.host_device import HostDevice
from hal.errors import ConfigError, ModelError
from hal.step import SEQUENCE, TOKEN, Batch, Bounds, InputBatch, State, StateSpec
from hal.step.state import canonical_states


def test_a_block_has_an_entry_for_each_of_its_groups() -> None:
    layer = {"latent": State(TOKEN, (6,)), "index": State(TOKEN, (10, 2), torch.bfloat16, group=8)}
    spec = StateSpec((layer,), torch.float32, num_blocks=3, block_size=16)
    shapes = {name: each.shape for name, each in canonical_states(spec, torch.device("cpu")).tensors()}
    assert shapes == {"0.latent": (3, 16, 6), "0.index": (3, 2, 10, 2)}
    assert spec.token_bytes == 6 * 4 + 10 * 2 * 2 / 8
    assert spec.nbytes == 3 * 16 * spec.token_bytes


def test_a_block_of_other_sizes_is_refused_by_the_name_of_the_state() -> None:
    layers = {}, {"index": State(TOKEN, (8,), group=12)}
    with pytest.raises(
        ConfigError, match=r"layer 1 keeps its index for groups of 12 tokens, and a block has 16"
    ) as error:
        StateSpec(layers, torch.float32, num_blocks=3, block_size=16)
    assert "cache.block_size to a multiple of 12" in str(error.value)


@pytest.mark.parametrize("wrong", [0, True, 2.0, None])
def test_groups_of_other_sizes_are_refused(wrong: Any) -> None:
    with pytest.raises(ModelError, match=f"a state per token has group = {wrong}"):
        State(TOKEN, (8,), group=wrong)
    with pytest.raises(ModelError, match="a state per sequence has group = 4"):
        State(SEQUENCE, (8,), group=4)


def test_the_last_token_of_a_group_has_the_slot_of_its_entry() -> None:
    block, group = 12, 4
    bounds = Bounds(vocab_size=100, first_block=1, num_blocks=20, max_length=60)
    inputs = InputBatch(Batch, device=HostDevice(), bounds=bounds, max_sequences=3, max_length=60, block_size=block)
    inputs.add([*range(30)], [7, 2, 9], cached=10)
    inputs.add([*range(8)], [5], cached=7)
    batch = inputs.batch([20, 1])
    wanted = torch.zeros(21, dtype=torch.int32)
    wanted[[1, 5, 9, 13, 17]] = torch.tensor([7 * 3 + 2, 2 * 3, 2 * 3 + 1, 2 * 3 + 2, 9 * 3], dtype=torch.int32)
    wanted[20] = 5 * 3 + 1
    assert torch.equal(batch.group_slots(group), wanted)
    assert torch.equal(batch.group_slots(1), batch.slot_mapping)
