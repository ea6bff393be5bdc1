"""The comparison of a loaded model with transformers' own forward, on two short sequences."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor

from hal.engines.transformers.models.calls import NAME
from hal.engines.transformers.models.probe import REMEDY
from hal.errors import ConfigError
from hal.step import StateSpec

BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""How far logits may differ, in parts of the largest, by the dtype of computation."""
LENGTHS = (8, 5)
"""The tokens of the sequences: prompts of all but two, then a step of each of those."""


def check_logits(model: Any, backend: Any) -> None:
    """Raise ConfigError unless steps through the cache give the logits of transformers' own forward.

    What it finds is attention of another kind, a state that is not in the cache, positions that a model counts itself,
    and layers in which the sequences of a batch see each other.

    Args:
        model: a loaded model.
        backend: its backend, entered.
    """
    device, dtype = backend.device.torch, next(model.parameters()).dtype
    rows = [[(7 * place + 5 * row + 3) % model.vocab_size for place in range(n)] for row, n in enumerate(LENGTHS)]
    wanted = [_own_forward(model, torch.tensor([row], device=device)) for row in rows]
    size = -(-max(LENGTHS) // backend.block_size)
    blocks = [list(range(1, 1 + size)), list(range(1 + size, 1 + 2 * size))]
    memory = backend.allocate(StateSpec(tuple(model.states), dtype, 1 + 2 * size, backend.block_size))
    differences = []
    for start, stop in ((0, -2), (-2, -1), (-1, None)) if model.causal else ((0, None),):
        cached = [0 if start == 0 else len(row) + start for row in rows]
        batch = model.batch_type.build(
            [row[start:stop] for row in rows],
            blocks,
            block_size=backend.block_size,
            cached=cached,
            device=device,
        )
        ends = batch.query_start_loc[1:] - 1
        found = model.logits(model(batch, memory.layers)[ends])
        for logits, row, own in zip(found, rows, wanted, strict=True):
            expected = own[len(row) - 1 if stop is None else len(row) + stop - 1]
            differences.append(float((logits - expected).abs().max() / expected.abs().max()))
    # In 16 bits, rounding may route a token to another expert.
    worst = max(differences) if dtype.itemsize > 2 else median(differences)
    if not worst <= BOUNDS[dtype]:  # NaN fails
        raise ConfigError(
            f"{model.of.__name__} of transformers gives other logits over hal's cache than by itself: they differ by "
            f"{worst:.1e} of the largest",
            f"{REMEDY}; check_model=false in hal's configuration omits this comparison",
        )


def _own_forward(model: Any, token_ids: Tensor) -> Tensor:
    """Return the logits ``[tokens, vocab_size]`` of one sequence, with attention as transformers spells it out."""
    try:
        model.config._attn_implementation = "eager"
        found: Tensor = model.of.forward(model, input_ids=token_ids, use_cache=False, return_dict=True).logits[0]
        return found
    finally:
        model.config._attn_implementation = NAME
