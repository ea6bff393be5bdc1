"""What one step is: the batch's fields, the shape of a step, and the states that a model keeps between steps.

Everything that has to know which dimension counts tokens, how a batch is padded, or which memory a model writes reads
the declarations in here.
"""

from hal.step.batch import Batch, SlotBatch
from hal.step.batch_inputs import Bounds
from hal.step.fields import Field, field, fields_of, host_twin
from hal.step.shape import StepShape
from hal.step.state import SEQUENCE, TOKEN, State, StateMemory, StateSpec
from hal.step.static_batch import StaticBatch

__all__ = [
    "SEQUENCE", "TOKEN", "Batch", "Bounds", "Field", "SlotBatch", "State", "StateMemory", "StateSpec", "StaticBatch",
    "StepShape", "field", "fields_of", "host_twin",
]  # fmt: skip
