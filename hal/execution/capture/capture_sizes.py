"""The sizes that are captured: numbers of sequences for whole steps, and of tokens for pieces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hal.config import CompilationConfig
from hal.errors import ConfigError
from hal.execution.context import FormContext

LARGEST = 1 << 16
"""Sequences, or tokens, that a graph may be captured for: beyond what any device has memory for."""
SMALLEST_TOKENS, LARGEST_TOKENS = 16, 1024
"""Of the token counts that prefill is captured for, where the config says nothing: they double."""


def sequences_to_capture(context: FormContext) -> list[int]:
    """The numbers of sequences to capture, ascending; none that the cache, or the engine's batches, do not reach.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    most = context.states.spec.num_blocks - 1
    if context.max_sequences is not None:
        most = min(most, context.max_sequences)
    return capture_sizes(context.config, context.backend.limits.capture_sizes, most)


def tokens_to_capture(context: FormContext) -> list[int]:
    """The numbers of tokens to capture, ascending: those of sequences for decode, else up to a whole prefill step.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    if context.phase == "decode":
        return sequences_to_capture(context)
    limit = context.backend.config.max_prefill_tokens
    most = min(limit, LARGEST_TOKENS)
    defaults = [size for exponent in range(32) if (size := SMALLEST_TOKENS << exponent) < most]
    return capture_sizes(context.config, (*defaults, most), limit)


def capture_sizes(config: CompilationConfig, defaults: Sequence[int], most: int | None = None) -> list[int]:
    """The sizes to capture, ascending.

    Args:
        config: what it names is captured.
        defaults: the backend's, for a config that names none.
        most: that a batch can have; larger ones of the defaults, but for the next larger, are left out.

    Raises:
        ConfigError: none is left, so that the graphs that the config asks for would never run.
    """
    asked: Sequence[int] = defaults if config.capture_sizes is None else config.capture_sizes
    if config.capture_sizes is None and most is not None:
        reached = bucket_for(most, sorted(defaults))
        asked = [size for size in defaults if reached is None or size <= reached]
    sizes = [size for size in sorted(set(asked)) if size <= (config.max_capture_size or size)]
    if not sizes:
        raise ConfigError(
            f"capture_sizes {list(asked)} and max_capture_size {config.max_capture_size} leave nothing to capture",
            'change them, or use the compiler "eager"',
        )
    if sizes[-1] > LARGEST:
        raise ConfigError(
            f"capture_sizes has {sizes[-1]}, and no graph is captured for more than {LARGEST}",
            "leave it out; larger batches run eagerly",
        )
    return sizes


def queries_to_capture(config: CompilationConfig) -> tuple[int, ...]:
    """The numbers of queries a sequence to capture.

    Raises:
        ConfigError: one is more than any graph is captured for.
    """
    if max(config.queries) > LARGEST:
        raise ConfigError(
            f"queries has {max(config.queries)}, and no graph is captured for more than {LARGEST}",
            "leave it out; such steps are prefills",
        )
    return config.queries


def bucket_for(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of ``sizes`` (ascending) that holds ``size``, or None."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None
