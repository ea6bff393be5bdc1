"""What a backend can take."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from hal.errors import DriverError

DEFAULT_BLOCK_SIZE = 64
"""Tokens per block of a cache, where neither the config nor the backend prefers another size."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those that operations declare tolerances for, and configurations can name."""


def _dtypes(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A tuple of some of :data:`DTYPES`."""
    if not (isinstance(value, tuple) and value and all(each in DTYPES for each in value)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}",
            f"give a tuple of one or more of {', '.join(map(str, DTYPES))}",
        )


def _sizes(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A tuple of positive integers."""
    if not (isinstance(value, tuple) and all(type(each) is int and each > 0 for each in value)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}",
            "give a tuple of positive integers, as (64, 128)",
        )


def _streams(limits: Limits, attribute: attrs.Attribute[Any], value: Any) -> None:
    """A number of streams: 1 or more where that is what a graph takes, and 0 or more, or None, as a limit."""
    least, none = (1, "") if attribute.name == "streams_per_graph" else (0, ", or None for no limit")
    if not ((none and value is None) or (type(value) is int and value >= least)):
        raise DriverError(
            f"the limits of a backend have {attribute.name}={value!r}", f"give an integer of at least {least}{none}"
        )


@attrs.frozen
class Limits:
    """What a backend can take. Constant for its lifetime.

    A :class:`~hal.errors.DriverError` is raised for values that are none of these.

    Attributes:
        dtypes: of weights, activations and caches.
        block_sizes: of the KV cache, the preferred first; empty if any will do.
        head_dims: that attention takes; empty if any will do.
        max_streams: streams that graphs may take together; None if there is no limit.
        streams_per_graph: streams that a graph takes, which forks none.
        capture_sizes: the decode batch sizes that are captured where the config names none, ascending.
    """

    dtypes: tuple[torch.dtype, ...] = attrs.field(default=DTYPES, validator=_dtypes)
    block_sizes: tuple[int, ...] = attrs.field(default=(), validator=_sizes)
    head_dims: tuple[int, ...] = attrs.field(default=(), validator=_sizes)
    max_streams: int | None = attrs.field(default=None, validator=_streams)
    streams_per_graph: int = attrs.field(default=1, validator=_streams)
    capture_sizes: tuple[int, ...] = attrs.field(default=(1, 2, 4, 8, 16, 32), validator=_sizes)
