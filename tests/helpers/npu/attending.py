"""Attention for tests of graphs on the NPU."""

from __future__ import annotations

from typing import Any

import hal
from helpers import attending

BLOCK = 128


class Attend(attending.Attend):
    """Attention with the NPU's block size."""

    def __init__(self, backend: hal.Backend, head_dim: int = 32, **given: Any) -> None:
        super().__init__(backend, block_size=BLOCK, head_dim=head_dim, **given)
