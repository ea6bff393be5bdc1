"""The batch of a model that predicts further tokens from the hidden states of another model."""

from __future__ import annotations

from functools import lru_cache

import attrs
import torch
from torch import Tensor

from hal.step.batch import Batch
from hal.step.fields import field


@lru_cache(maxsize=64)
def draft_batch(width: int, dtype: torch.dtype) -> type[Batch]:
    """Return a batch class with the field ``hidden_states``, ``[tokens, width]``, which each batch must be given.

    ``token_ids`` has, for each position, the token that follows it. ``hidden_states`` has what the target model's step
    returned for that position, or what the drafting model returned in its last step.

    Args:
        width: the elements of a hidden state.
        dtype: the dtype, which is the model's.
    """

    @attrs.frozen(eq=False)
    class DraftBatch(Batch):
        hidden_states: Tensor = field(f"tokens {width}", dtype)

    return DraftBatch
