"""What the declarations make of texts on the CPU, in a dtype and in a wider one, to hold a backend's logits against.

:mod:`hal.ops.tolerance` says how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hal.checkpoint.loading import load_model
from hal.drivers.backend import active_backend
from hal.execution.runner import Runner
from hal.ops.rounding import ReferenceLogits
from hal.step import ALL
from hal.testing.models.random_checkpoint import checkpoint
from hal.testing.target import reference_backend

Texts = tuple[tuple[int, ...], ...]

BLOCK = 64


@lru_cache(maxsize=64)
def reference_logits(family: str, head_dim: int, dtype: torch.dtype, texts: Texts) -> ReferenceLogits:
    """Run the reference on ``texts``."""
    before = active_backend()
    try:
        rounded = _logits(family, head_dim, dtype, dtype, texts)
        wider = torch.float64 if dtype == torch.float32 else torch.float32
        exact = _logits(family, head_dim, torch.float32, wider, texts)
    finally:
        if before is not None:
            before.activate()
    return ReferenceLogits.of(rounded, exact, dtype)


def _logits(family: str, head_dim: int, loaded: torch.dtype, computed: torch.dtype, texts: Texts) -> Sequence[Tensor]:
    needed = [math.ceil(len(text) / BLOCK) for text in texts]
    backend = reference_backend(loaded, sum(needed) * BLOCK, BLOCK)
    backend.activate()
    runner = Runner(load_model(checkpoint(family, head_dim), backend).to(computed), backend)
    free = iter(range(1, 1 + sum(needed)))
    blocks = [[next(free) for _ in range(count)] for count in needed]
    return [
        runner.step(runner.batch([text], [owned]), ALL).logits.double()
        for text, owned in zip(texts, blocks, strict=True)
    ]
