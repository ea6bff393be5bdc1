"""Tables of positions whose rows a model counts out itself: in a step, they give the rows of the batch's positions."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hal.engines.transformers.models.calls import PHASE
from hal.engines.transformers.models.layers import takes_one

COUNTED = 5
"""The positions that a table is asked for, to find its first row."""


def answer_positions(model: nn.Module) -> None:
    """Let the tables of a model give the rows of the positions of the phase that runs.

    A table is an embedding whose forward takes more than indices, and that gives consecutive rows of its weight for the
    first tokens of a sequence. Without a phase, it computes what it did.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding) and not takes_one(module):
            first = _first_row(module)
            if first is not None:
                module.hal_first_row = first  # type: ignore[assignment]
                module.forward = MethodType(_rows, module)  # type: ignore[method-assign]


def _rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    positions = getattr(PHASE.get(), "positions", None)
    if positions is None:
        return type(self).forward(self, *args, **kwargs)
    return functional.embedding(positions + self.hal_first_row, self.weight)


def _first_row(module: nn.Embedding) -> int | None:
    """Return the row of the first position, or None if the module is no table of positions."""
    with torch.device("cpu"), torch.no_grad():
        rows = min(module.num_embeddings, 2 * COUNTED)
        weight = torch.arange(rows, dtype=torch.float32).unsqueeze(-1).expand(-1, module.embedding_dim).contiguous()
        for given in _arguments(module.embedding_dim):
            try:
                found = torch.func.functional_call(module, {"weight": weight}, (given,))
            except Exception:  # It takes something else.
                continue
            if isinstance(found, Tensor) and found.shape[-2:] == (COUNTED, module.embedding_dim):
                numbers = found.reshape(-1, COUNTED, module.embedding_dim)[0, :, 0]
                first = int(numbers[0])
                if torch.equal(numbers, torch.arange(first, first + COUNTED, dtype=numbers.dtype)):
                    return first
    return None


def _arguments(width: int) -> Iterator[Any]:
    """Yield what tables take first: token ids, their shape, or embeddings."""
    yield torch.full((1, COUNTED), 3)
    yield torch.Size((1, COUNTED))
    yield torch.zeros(1, COUNTED, width)
