"""Batches of models that read more than tokens: states per sequence, embeddings, or another model's hidden states."""

from __future__ import annotations

from functools import lru_cache

import attrs
import torch
from torch import Tensor

from hal.step.batch import Batch
from hal.step.dummies import DUMMY_SLOT
from hal.step.fields import field


@attrs.frozen(eq=False, slots=False)  # so that a class can derive from it and from another kind of batch
class SlotBatch(Batch):
    """A batch for a model that keeps a state per sequence.

    Attributes:
        slots: ``[sequences]``, int32: the slot of each sequence, from ``runner.slots``; the dummy slot for padding.
    """

    slots: Tensor = field("sequences", torch.int32, pad=DUMMY_SLOT)


def _none_embedded(batch: Batch) -> Tensor:
    return torch.zeros(batch.num_tokens, dtype=torch.bool, device=batch.token_ids.device)


def _equal_axes(batch: Batch) -> Tensor:
    return batch.positions.expand(3, -1)


@attrs.frozen(eq=False)
class EmbeddingBatch(Batch):
    """A batch in which some tokens have embeddings of an encoder in place of the model's own.

    A model declares their width and dtype with :func:`embedding_batch`, which adds the field ``embeddings``. In batches
    that are built without these fields, all tokens are text.

    Attributes:
        embedded: ``[tokens]``, bool: whether a token has an embedding of an encoder.
    """

    embedded: Tensor = field("tokens", torch.bool, default=_none_embedded)


@attrs.frozen(eq=False)
class AxesBatch(EmbeddingBatch):
    """A batch whose tokens have positions along three axes: time, height and width.

    Attributes:
        axis_positions: ``[3, tokens]``, int64: the positions that the rotary embedding reads; of text, three times its
            position. ``positions`` stays each token's place in its sequence.
    """

    axis_positions: Tensor = field("3 tokens", torch.int64, default=_equal_axes)


@attrs.frozen(eq=False)
class AxesSlotBatch(AxesBatch, SlotBatch):
    """A batch with positions along three axes, for a model that also keeps a state per sequence."""


@lru_cache(maxsize=64)
def embedding_batch(base: type[EmbeddingBatch], width: int, dtype: torch.dtype) -> type[EmbeddingBatch]:
    """Return a batch class with the field ``embeddings``, ``[tokens, width]``; zeros for text.

    Args:
        base: the class to derive from.
        width: the elements of an embedding. A model may have several parts for a token side by side.
        dtype: the dtype, which is the model's.
    """

    def zeros(batch: Batch) -> Tensor:
        return torch.zeros(batch.num_tokens, width, dtype=dtype, device=batch.token_ids.device)

    @attrs.frozen(eq=False)
    class SizedBatch(base):  # type: ignore[valid-type, misc]
        embeddings: Tensor = field(f"tokens {width}", dtype, default=zeros)

    SizedBatch.__name__ = SizedBatch.__qualname__ = base.__name__
    return SizedBatch


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
