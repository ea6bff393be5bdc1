"""States and batches for tests of a step without a runner."""

from __future__ import annotations

import torch

from hal.nn import CausalLM
from hal.step import Batch, StateMemory, StateSpec, StaticBatch, StepShape
from hal.step.state import canonical_states

CPU = torch.device("cpu")


def states_of(
    model: CausalLM, num_blocks: int = 8, *, block_size: int = 16, dtype: torch.dtype = torch.float32
) -> StateMemory:
    """Return zeroed states of a model on the CPU."""
    return canonical_states(StateSpec(tuple(model.states), dtype, num_blocks, block_size, num_slots=8), CPU)


def padding_of(model: CausalLM, shape: StepShape, *, columns: int = 5, block_size: int = 16) -> Batch:
    """Return a batch of padding with a given shape."""
    return StaticBatch(model.batch_type, shape, max_blocks=columns, block_size=block_size, device=CPU).batch
