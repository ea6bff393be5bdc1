"""Data of one step: the batch and its fields, the shape of the step, and the states that a model keeps between steps.

Code that counts tokens, pads a batch, or tracks the memory that a model writes reads these declarations.
"""

from hal.device.device import to_device
from hal.step.batch import Batch
from hal.step.batch_inputs import Bounds
from hal.step.fields import Field, field, fields_of, host_twin
from hal.step.input_batch import InputBatch
from hal.step.model_batches import (
    AxesBatch,
    AxesSlotBatch,
    EmbeddingBatch,
    EncoderBatch,
    SlotBatch,
    draft_batch,
    embedding_batch,
    grouped_batch,
    rollback_batch,
)
from hal.step.padding import StaticBatch
from hal.step.page_layout import CacheGroups, PageLayout
from hal.step.rows import ALL, LAST, NONE, Rows, SplitBatch, Wanted, last_rows, split_batch
from hal.step.shape import StepShape
from hal.step.state import SEQUENCE, TOKEN, State, StateMemory, StateSpec

__all__ = [
    "ALL",
    "LAST",
    "NONE",
    "SEQUENCE",
    "TOKEN",
    "AxesBatch",
    "AxesSlotBatch",
    "Batch",
    "Bounds",
    "CacheGroups",
    "EmbeddingBatch",
    "EncoderBatch",
    "Field",
    "InputBatch",
    "PageLayout",
    "Rows",
    "SlotBatch",
    "SplitBatch",
    "State",
    "StateMemory",
    "StateSpec",
    "StaticBatch",
    "StepShape",
    "Wanted",
    "draft_batch",
    "embedding_batch",
    "field",
    "fields_of",
    "grouped_batch",
    "host_twin",
    "last_rows",
    "rollback_batch",
    "split_batch",
    "to_device",
]
