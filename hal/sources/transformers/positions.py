"""Tables of positions whose rows a model counts out itself: in a step, they give the rows of the batch's positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hal.sources.transformers.layers import takes_one
from hal.sources.transformers.phase import PHASE

COUNTED = 5
"""The positions that a table is asked for, to find its first row."""


def answer_positions(model: nn.Module) -> None:
    """Let the tables of a model give the rows of the positions of the phase that runs.

    A table is an embedding that gives consecutive rows of its weight for the first tokens of a sequence: its forward
    takes more than indices, or the module around it counts them if it is not told positions. Without a phase, it
    computes what it did.
    """
    for module in model.modules():
        found: dict[nn.Embedding, int | None] = {}
        if isinstance(module, nn.Embedding) and not takes_one(module):
            found[module] = _first_row(module)
        elif _is_flat(module) and {"input_ids", "position_ids"} <= inspect.signature(module.forward).parameters.keys():
            found |= _counted(module)
        for table, first in found.items():
            if first is not None:
                table.hal_first_row = first  # type: ignore[assignment]
                table.forward = MethodType(_rows, table)  # type: ignore[method-assign]


def _rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    positions = getattr(PHASE.get(), "positions", None)
    if positions is None:
        return type(self).forward(self, *args, **kwargs)
    return functional.embedding(positions + self.hal_first_row, self.weight)


def _is_flat(module: nn.Module) -> bool:
    """Return whether a module has only layers of one level, as modules of embeddings have."""
    return bool(list(module.children())) and not any(list(each.children()) for each in module.children())


def _counted(module: nn.Module) -> dict[nn.Embedding, int | None]:
    """Return the first row of each embedding of a module to which it gives consecutive indices for a sequence."""
    tables = [each for each in module.children() if isinstance(each, nn.Embedding)]
    found: dict[nn.Embedding, int | None] = {}

    def note(table: nn.Module, args: tuple[Any, ...]) -> None:
        first = int(args[0].flatten()[0])
        wanted = torch.arange(first, first + COUNTED, device="cpu")
        if isinstance(table, nn.Embedding) and torch.equal(args[0].flatten().cpu(), wanted):
            found[table] = first

    hooks = [each.register_forward_pre_hook(note) for each in tables]
    padding = getattr(module, "padding_idx", None)
    given = torch.full((1, COUNTED), 3 if padding != 3 else 4, device="cpu")
    try:
        with torch.device("cpu"), torch.no_grad():
            values = {
                name: torch.zeros((), dtype=each.dtype).expand(each.shape)
                for name, each in (*module.named_parameters(), *module.named_buffers())
            }
            torch.func.functional_call(module, values, (), {"input_ids": given})
    except Exception:  # It computes more than embeddings.
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found


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
