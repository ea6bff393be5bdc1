"""The numbers, scales and minima of GGUF's K-quants, whose blocks of 256 have smaller groups.

Source: the description of the formats in ggml: a number is ``d * s * n - e * m`` in Q4_K and Q5_K, and
``d * s * (n - 32)`` in Q6_K. ``s`` and ``m`` are six bits of each group of 32, and in Q6_K an int8 of each group of 16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def k_scales(name: str, raw: Bytes) -> NDArray[np.float32]:
    """Return the scales of the groups, float32 ``[rows, blocks, groups of a block]``.

    Args:
        name: the type.
        raw: the bytes of the rows: uint8 ``[rows, blocks, bytes of a block]``.
    """
    if name == "Q6_K":
        return _half(raw[..., 208:210]) * np.ascontiguousarray(raw[..., 192:208]).view(np.int8)
    low, high = raw[..., 4:8], raw[..., 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    return _half(raw[..., :2]) * scales


def k_minima(raw: Bytes) -> NDArray[np.float32]:
    """Return what is subtracted from the scaled numbers of the groups, as :func:`k_scales` does. Q6_K has none."""
    middle, high = raw[..., 8:12], raw[..., 12:16]
    return _half(raw[..., 2:4]) * np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), axis=-1)


def k_numbers(name: str, raw: Bytes) -> Bytes:
    """Return the unsigned numbers, uint8 ``[rows, blocks, 256]``."""
    if name == "Q6_K":
        low = raw[..., :128].reshape(*raw.shape[:2], 2, 2, 32)
        low = np.stack((low & 15, low >> 4), axis=-3)
        high = raw[..., 128:192].reshape(*raw.shape[:2], 2, 1, 1, 32) >> np.array([0, 2, 4, 6]).reshape(2, 2, 1) & 3
        return np.asarray(low | high.astype(np.uint8) << 4, np.uint8).reshape(*raw.shape[:2], -1)
    packed = raw[..., -128:].reshape(*raw.shape[:2], 4, 1, 32)
    found: Bytes = np.concatenate((packed & 15, packed >> 4), axis=-2).reshape(*raw.shape[:2], 8, 32)
    if name == "Q5_K":
        high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        found |= high.astype(np.uint8) << 4
    return found.reshape(*raw.shape[:2], -1)


def _half(raw: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
