"""A check of what models give: the logits that were asked for."""

from __future__ import annotations

from torch import Tensor

from hal.errors import ModelError
from hal.nn import CausalLM
from hal.step.batch import Batch


def check_logits(model: CausalLM, logits: Tensor, batch: Batch) -> Tensor:
    """Return ``logits``, if they are what ``batch`` asks of ``model``.

    Raises:
        ModelError: they are no tensor, or of another shape.
    """
    wanted = (batch.logits_indices.shape[0], model.vocab_size)
    found = getattr(logits, "shape", None)
    if found == wanted:
        return logits
    what = f"a {type(logits).__name__}, not logits" if found is None else f"logits of {list(found)}, not {list(wanted)}"
    raise ModelError(
        f"{type(model).__name__} gave {what}",
        "let its forward take hidden[batch.logits_indices] before it projects them to vocab_size, and return that",
    )
