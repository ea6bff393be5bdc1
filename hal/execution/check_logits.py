"""Validation of a model's logits."""

from __future__ import annotations

from torch import Tensor

from hal.errors import ModelError
from hal.nn import CausalLM
from hal.step.batch import Batch


def check_logits(model: CausalLM, logits: Tensor, batch: Batch) -> Tensor:
    """Return ``logits`` if they have the shape that ``batch`` requests.

    Raises:
        ModelError: they are not a tensor, or have another shape.
    """
    wanted = (batch.logits_indices.shape[0], model.vocab_size)
    found = getattr(logits, "shape", None)
    if found == wanted:
        return logits
    what = f"a {type(logits).__name__}, not logits" if found is None else f"logits of {list(found)}, not {list(wanted)}"
    raise ModelError(
        f"{type(model).__name__}.forward returned {what}",
        "select hidden[batch.logits_indices] in forward, project it to vocab_size, and return the result",
    )
