"""Batches of models whose layers are in several cache groups, each with its own block table or slots."""

from __future__ import annotations

from typing import Any

import attrs

from hal.step.batch import Batch
from hal.step.fields import fields_of, suffixed
from hal.step.model_batches import SlotBatch
from hal.step.page_layout import CacheGroups

TABLES = ("block_table", "slot_mapping")
"""The fields that a group of layers with states per token has."""
SLOTS = ("slots",)
"""The fields that a group of layers with states per sequence has."""


def grouped_batch(base: type[Batch], groups: CacheGroups, num_layers: int) -> type[Batch]:
    """Return a batch class whose :meth:`~hal.step.Batch.for_layer` has the table or the slots of a layer's group.

    The first group of each kind has the fields of ``base``. The others have fields with their number, such as
    ``block_table_1``.

    Args:
        base: the class of the model's batches.
        groups: the groups.
        num_layers: the number of the model's layers.
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
