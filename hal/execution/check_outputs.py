"""Validation of what a model returns."""

from __future__ import annotations

from torch import Tensor

from hal.drivers.compiler import Outputs
from hal.errors import ModelError
from hal.nn import CausalLM


def check_hidden(model: CausalLM, found: Outputs, tokens: int) -> None:
    """Raise ModelError unless hidden states are ``[tokens, width]``, and the extra tensors have a row per token."""
    for name, tensor in zip(("hidden states", *model.extra), found, strict=False):
        if tensor.shape[:1] == (tokens,) and (name in model.extra or tensor.dim() == 2):
            continue
        wanted = f"[{tokens}, ...]" if name in model.extra else f"[{tokens}, width]"
        raise ModelError(
            f"{type(model).__name__}.forward returned {name} of {list(tensor.shape)}, not {wanted}",
            "return a row for each token; logits are computed in the method logits",
        )


def check_logits(model: CausalLM, logits: Tensor, rows: int) -> None:
    """Raise ModelError unless logits are ``[rows, vocab_size]``."""
    wanted = (rows, model.vocab_size)
    found = getattr(logits, "shape", None)
    if found != wanted:
        what = f"a {type(logits).__name__}" if found is None else f"{list(found)}"
        raise ModelError(
            f"{type(model).__name__}.logits returned {what}, not logits of {list(wanted)}",
            "project hidden states, [rows, width], to vocab_size",
        )
