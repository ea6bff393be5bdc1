"""The attention of tests of graphs, on the NPU."""

from __future__ import annotations

import hal
from helpers import attending

BLOCK = 128


class Attend(attending.Attend):
    """In the blocks that the NPU has."""

    def __init__(self, backend: hal.Backend, window: int | None = None, head_dim: int = 32) -> None:
        super().__init__(backend, block_size=BLOCK, head_dim=head_dim, window=window)
