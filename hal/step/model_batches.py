"""Batches of models that read more than tokens: states per sequence, embeddings, or another model's hidden states.

Encoders, and models whose layers are in several cache groups, have batches here, too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor

from hal.ops.lora import NO_ADAPTER
from hal.step.batch import Batch
from hal.step.fields import DUMMY_SLOT, BatchBase, Padding, field, fields_of, host_twin, suffixed
from hal.step.page_layout import CacheGroups
from hal.step.shape import StepShape


@attrs.frozen(eq=False, slots=False)  # so that a class can derive from it and from another kind of batch
class SlotBatch(Batch):
    """A batch for a model that keeps a state per sequence.

    Attributes:
        slots: ``[sequences]``, int32: the slot of each sequence, from ``runner.slots``; the dummy slot for padding.
    """

    slots: Tensor = field("sequences", torch.int32, pad=DUMMY_SLOT)

    @property
    def state_slots(self) -> tuple[Tensor, Tensor | None]:
        """``read_slots`` and ``write_slots`` of operations; the latter None where a step keeps the last states only."""
        return self.slots, None


@lru_cache(maxsize=64)
def rollback_batch(base: type[SlotBatch], saves: int) -> type[SlotBatch]:
    """Return a batch class with the field ``write_slots``, ``[sequences, saves]``, which each batch must be given.

    A step keeps the states after each of the last ``saves`` tokens of a sequence, so that those of rejected drafts can
    be dropped by the choice of a slot: :meth:`hal.step.InputBatch.truncate` does.

    Args:
        base: the class to derive from.
        saves: the slots of each sequence, one more than drafted tokens.
    """

    @attrs.frozen(eq=False, slots=False)
    class RollbackBatch(base):  # type: ignore[valid-type, misc]
        write_slots: Tensor = field(f"sequences {saves}", torch.int32, pad=DUMMY_SLOT)

        @property
        def state_slots(self) -> tuple[Tensor, Tensor | None]:
            return self.slots, self.write_slots

    RollbackBatch.saves = saves
    RollbackBatch.__name__ = RollbackBatch.__qualname__ = base.__name__
    return RollbackBatch


def _no_adapters(batch: Batch) -> Tensor:
    return torch.full((batch.num_tokens,), NO_ADAPTER, dtype=torch.int32, device=batch.token_ids.device)


@lru_cache(maxsize=64)
def adapter_batch(base: Any, *, required: bool = False) -> type[Batch]:
    """Return a batch class with the field ``adapter_slots``, ``[tokens]``, int32: the slot of each token's adapter.

    Tokens without an adapter, and padding, have the slot -1. In batches that are built without the field, all have.

    Args:
        base: the class to derive from.
        required: whether each batch must be given the field.
    """
    default = None if required else _no_adapters

    @attrs.frozen(eq=False, slots=False)
    class AdapterBatch(base):  # type: ignore[misc]
        adapter_slots: Tensor = field("tokens", torch.int32, pad=NO_ADAPTER, default=default)

    AdapterBatch.__name__ = AdapterBatch.__qualname__ = base.__name__
    return AdapterBatch


@lru_cache(maxsize=64)
def given_batch(base: Any, name: str, width: int) -> type[Batch]:
    """Return a batch class with a field ``[tokens, width]``, int32, of numbers that are given to a model's layers.

    Padding, and batches that are built without the field, have -1.

    Args:
        base: the class to derive from.
        name: the field's name.
        width: its numbers for each token.
    """

    def none_given(batch: Batch) -> Tensor:
        return torch.full((batch.num_tokens, width), -1, dtype=torch.int32, device=batch.token_ids.device)

    fields = {name: field(f"tokens {width}", torch.int32, pad=-1, default=none_given)}
    options: dict[str, Any] = {"frozen": True, "eq": False, "slots": False, "collect_by_mro": True}
    made: type[Batch] = attrs.make_class(base.__name__, fields, (base,), **options)
    return made


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


def padding_last(padding: Padding) -> Tensor:
    """Return starts in which padding tokens are one sequence, behind those of a batch."""
    starts = torch.full((padding.sizes["sequences"] + 1,), padding.sizes["tokens"], dtype=torch.int32)
    starts[0] = 0
    return starts


@attrs.frozen(eq=False)
class EncoderBatch(BatchBase):
    """The tensors that an encoder reads in one step. An encoder declares a subclass with further fields.

    ``tokens`` counts what the encoder's layers map, such as patches, and ``sequences`` the parts within which they
    attend, such as frames.

    Attributes:
        query_start_loc: ``[sequences + 1]``, int32: the first token of each sequence, then ``tokens``.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
    """

    query_start_loc: Tensor = field("sequences+1", torch.int32, pad=padding_last)
    query_start_loc_host: Tensor = host_twin("query_start_loc")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, from the host twin."""
        return int(self.query_start_loc_host[-1])

    @property
    def shape(self) -> StepShape:
        """The shape of the step."""
        return StepShape(self.num_tokens, self.query_start_loc_host.shape[0] - 1, 0)


TABLES = ("block_table", "slot_mapping")
"""The fields that a group of layers with states per token has."""
SLOTS = ("slots",)
"""The fields that a group of layers with states per sequence has."""


def grouped_batch(base: type[Batch], groups: CacheGroups, num_layers: int) -> type[Batch]:
    """Return a batch class whose :meth:`~hal.step.Batch.for_layer` has the table or the slots of a layer's group.

    The first group of each kind has the fields of ``base``. The others have fields with their number, such as
    ``block_table_1``.
    """
    declared = attrs.fields_dict(base)
    added: dict[str, Any] = {}
    for names, count in ((TABLES, groups.num_tables), (SLOTS, groups.num_slots)):
        for number in range(1, count):
            added |= {suffixed(name, number): attrs.field(metadata=declared[name].metadata) for name in names}
    of_layer = [0] * num_layers
    for group, layers in enumerate(groups.layers):
        for layer in layers:
            of_layer[layer] = groups.number(group)
    # What a layer of a group reads: the fields of a batch, some with the group's number.
    view = SlotBatch if issubclass(base, SlotBatch) else Batch
    own = fields_of(view)
    read = tuple(
        tuple(other if (other := suffixed(name, number)) in added else name for name in own)
        for number in range(max(groups.num_tables, groups.num_slots))
    )

    def for_layer(self: Batch, layer: int) -> Batch:
        number = of_layer[layer]
        return view(*[getattr(self, name) for name in read[number]]) if number else self

    made: type[Batch] = attrs.make_class(
        base.__name__,
        added,
        bases=(base,),
        class_body={"for_layer": for_layer, "groups": groups},
        frozen=True,
        eq=False,
        slots=True,  # Else the fields of a base with slots would be written beside them.
    )
    return made
