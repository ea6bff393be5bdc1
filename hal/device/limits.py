"""The limits of a backend: dtypes, sizes and numbers of streams."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hal.errors import DriverError

DEFAULT_BLOCK_SIZE = 64
"""Tokens per block of a cache, if neither the configuration nor the backend specifies a size."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that operations declare tolerances for, and that configurations can name."""

CACHE_DTYPES = ("int8", "fp8")
"""The values of ``cache.dtype`` that quantize a cache."""


def _dtypes(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of one or more of :data:`DTYPES`."""
    if not (isinstance(value, tuple) and value and all(each in DTYPES for each in value)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}, not a tuple of supported dtypes",
            f"use a tuple of one or more of {', '.join(map(str, DTYPES))}",
        )


def _cache_dtypes(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of names of :data:`CACHE_DTYPES`."""
    if not (isinstance(value, tuple) and all(each in CACHE_DTYPES for each in value)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}, not a tuple of dtypes of quantized caches",
            f"use a tuple of some of {', '.join(map(repr, CACHE_DTYPES))}",
        )


def _schemes(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of names."""
    if not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}, not a tuple of names of quantization schemes",
            'use a tuple of names, such as ("fp8",)',
        )


def _sizes(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a tuple of positive integers."""
    if not (isinstance(value, tuple) and all(type(each) is int and each > 0 for each in value)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}, not a tuple of positive integers",
            "use a tuple of positive integers, such as (64, 128)",
        )


def _count(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Validate a number, which is 1 or more, or ``max_streams``, which is 0 or more, or None."""
    least, none = (1, "") if attribute.name != "max_streams" else (0, ", or None for no limit")
    if not ((none and value is None) or (type(value) is int and value >= least)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}", f"use an integer of at least {least}{none}"
        )


@attrs.frozen
class Limits:
    """The limits of a backend, constant for its lifetime. Invalid values raise :class:`~hal.errors.DriverError`.

    Attributes:
        dtypes: the dtypes of weights, activations and caches.
        block_sizes: supported block sizes of the KV cache, the preferred one first; empty if any is supported.
        head_dims: head dimensions that attention supports; empty if any is supported.
        cache_dtypes: the values of ``cache.dtype``, ``int8`` and ``fp8``, for which the backend has kernels.
        requantized: the quantization schemes whose weights ``quantized_weights`` ``auto`` converts to ``w8a8_dynamic``
            at load, because kernels would widen them in each step.
        group_multiple: what the sizes of the groups of packed weights are a multiple of, in kernels that do not widen
            the weights in each step. Layers of GGUF files with other groups are dequantized at load.
        max_streams: the number of streams that all graphs together may use; None for no limit.
        streams_per_graph: the number of streams that a graph without forks uses.
        capture_sizes: the default decode batch sizes to capture, ascending.
    """

    dtypes: tuple[torch.dtype, ...] = attrs.field(default=DTYPES, validator=_dtypes)
    block_sizes: tuple[int, ...] = attrs.field(default=(), validator=_sizes)
    head_dims: tuple[int, ...] = attrs.field(default=(), validator=_sizes)
    cache_dtypes: tuple[str, ...] = attrs.field(default=(), validator=_cache_dtypes)
    requantized: tuple[str, ...] = attrs.field(default=(), validator=_schemes)
    group_multiple: int = attrs.field(default=1, validator=_count)
    max_streams: int | None = attrs.field(default=None, validator=_count)
    streams_per_graph: int = attrs.field(default=1, validator=_count)
    capture_sizes: tuple[int, ...] = attrs.field(default=(1, 2, 4, 8, 16, 32), validator=_sizes)


UNLIMITED = Limits()
"""Limits that restrict nothing."""
