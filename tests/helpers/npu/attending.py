"""Attention for tests of graphs on the NPU."""

from __future__ import annotations

import hal
from helpers import attending

BLOCK = 128


class Attend(attending.Attend):
    """Attention with the NPU's block size."""

    def __init__(self, backend: hal.Backend, window: int | None = None, head_dim: int = 32) -> None:
        super().__init__(backend, block_size=BLOCK, head_dim=head_dim, window=window)
