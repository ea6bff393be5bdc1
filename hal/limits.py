"""What a backend can take."""

from __future__ import annotations

import attrs
import torch

DEFAULT_BLOCK_SIZE = 64
"""Tokens per block of a cache, where neither the config nor the backend prefers another size."""


@attrs.frozen
class Limits:
    """What a backend can take. Constant for its lifetime.

    Attributes:
        dtypes: of weights, activations and caches.
        block_sizes: of the KV cache, the preferred first; empty if any will do.
        head_dims: that attention takes; empty if any will do.
        max_streams: streams that graphs may take together; None if there is no limit.
        streams_per_graph: streams that a graph takes, which forks none.
        capture_sizes: the decode batch sizes that are captured where the config names none, ascending.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    block_sizes: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    max_streams: int | None = None
    streams_per_graph: int = 1
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
