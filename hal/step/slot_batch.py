"""The batch of a model that keeps states per sequence."""

from __future__ import annotations

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
