"""What is captured: the sizes, and the resources that they need, estimated so that captures fail early.

Sizes are numbers of sequences or embeddings for whole steps, and numbers of tokens for pieces.
:mod:`hal.execution.capture.captured_form` chooses the size for a batch, and :mod:`hal.step.padding` pads the batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from hal.config import CompilationConfig
from hal.config.bounds import SEQUENCES as LARGEST
from hal.device.device import Device
from hal.drivers.backend import Backend
from hal.errors import CaptureError, ConfigError
from hal.execution.context import FormContext
from hal.step import StepShape

T = TypeVar("T")

SMALLEST_TOKENS, LARGEST_TOKENS = 16, 1024
"""The range of the default token counts for prefill. Each count is twice the one before."""
EMBEDDINGS = (64, 256, 1024)
"""The default numbers of an encoder's embeddings."""


def shapes_to_capture(context: FormContext) -> list[StepShape]:
    """Return the shapes of whole steps to capture, the largest first.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    if (encoder := context.encoder) is not None:
        sizes = embeddings_to_capture(context.config, context.backend.config.max_prefill_tokens)
        tokens = [size * encoder.row_tokens for size in reversed(sizes)]
        return [StepShape(each, max(2, encoder.most_sequences(each)), 0) for each in tokens]
    sizes, numbers = sequences_to_capture(context), queries_to_capture(context.config)
    shapes = [StepShape.uniform(size, queries) for queries in numbers for size in sizes]
    return sorted(shapes, key=lambda shape: -shape.tokens)


def sequences_to_capture(context: FormContext) -> list[int]:
    """Return the numbers of sequences to capture, ascending, up to what the cache and the engine's batches can reach.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    most = context.states.spec.num_blocks - 1
    if context.max_sequences is not None:
        most = min(most, context.max_sequences)
    return capture_sizes(context.config, context.backend.limits.capture_sizes, most)


def tokens_to_capture(context: FormContext) -> list[int]:
    """Return the numbers of tokens to capture, ascending: for decode those of sequences, else up to a prefill step.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    if context.phase == "decode":
        return sequences_to_capture(context)
    return prompt_tokens_to_capture(context.config, context.backend.config.max_prefill_tokens)


def prompt_tokens_to_capture(config: CompilationConfig, limit: int) -> list[int]:
    """Return the numbers of tokens of prefill steps to capture, ascending.

    Args:
        config: of the phase.
        limit: the most tokens of a step.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    most = min(limit, LARGEST_TOKENS)
    defaults = [size for exponent in range(32) if (size := SMALLEST_TOKENS << exponent) < most]
    return capture_sizes(config, (*defaults, most), limit)


def embeddings_to_capture(config: CompilationConfig, limit: int) -> list[int]:
    """Return the numbers of embeddings to capture, ascending.

    Args:
        config: of the encoder.
        limit: the most embeddings of a step.

    Raises:
        ConfigError: see :func:`capture_sizes`.
    """
    return capture_sizes(config, [size for size in EMBEDDINGS if size <= limit] or [limit])


def capture_sizes(config: CompilationConfig, defaults: Sequence[int], most: int | None = None) -> list[int]:
    """Return the sizes to capture, ascending.

    Args:
        config: the sizes it names are captured.
        defaults: the backend's sizes, for a config that names none.
        most: the largest batch. Default sizes above it are skipped, except the next larger one.

    Raises:
        ConfigError: no size is left, or one is above the largest of :mod:`hal.config.bounds`.
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
            f"capture_sizes has {sizes[-1]}, and the largest graph has {LARGEST}",
            "leave that size out; larger batches run uncaptured",
        )
    return sizes


def queries_to_capture(config: CompilationConfig) -> tuple[int, ...]:
    """Return the numbers of queries per sequence to capture.

    Raises:
        ConfigError: a number is above the largest of :mod:`hal.config.bounds`.
    """
    if max(config.queries) > LARGEST:
        raise ConfigError(
            f"queries has {max(config.queries)}, and the largest graph has {LARGEST}",
            "leave that number out; such steps count as prefill",
        )
    return config.queries


def bucket_for(size: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of ``sizes`` (ascending) that holds ``size``, or None."""
    place = bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else None


def growth_in(run: Callable[[], T], device: Device) -> tuple[T, int | None]:
    """Return the result of a step, and the growth of memory in it in bytes; None if the device cannot measure it."""
    device.synchronize()
    measured, before = device.reset_peak(), device.memory_stats().allocated
    result = run()
    device.synchronize()
    return result, max(0, device.memory_stats().peak - before) if measured else None


MARGIN = 1.15
"""Graphs that share a pool, captured largest first, take little more than the largest step: at most this factor."""


@attrs.frozen
class CaptureBudget:
    """The streams and the memory that graphs need, and those that are available.

    Attributes:
        phase: ``decode`` or ``prefill``.
        shapes: the shapes to capture.
        streams: the streams of their graphs.
        streams_left: the device's streams left for graphs; None if there is no limit.
        bytes: the memory of all graphs, estimated from an eager step of the largest shape; None if the device cannot
            measure it.
        bytes_left: the device's free memory.
    """

    phase: str
    shapes: tuple[StepShape, ...]
    streams: int
    streams_left: int | None
    bytes: int | None
    bytes_left: int

    @classmethod
    def measure(
        cls,
        backend: Backend,
        shapes: Sequence[StepShape],
        largest_step: Callable[[], Any],
        *,
        phase: str = "decode",
        graphs: int = 1,
    ) -> CaptureBudget:
        """Run ``largest_step`` once, eagerly, and measure it. This also warms the device up.

        Args:
            backend: captures the graphs.
            shapes: the shapes to capture.
            largest_step: a step of the largest shape.
            phase: ``decode`` or ``prefill``.
            graphs: the number of graphs per shape.
        """
        device, limits = backend.device, backend.limits
        _, growth = growth_in(largest_step, device)
        device.empty_cache()  # Graphs have a separate pool, which cannot use memory cached for others.
        return cls(
            phase=phase,
            shapes=tuple(shapes),
            streams=len(shapes) * graphs * limits.streams_per_graph,
            streams_left=None if limits.max_streams is None else limits.max_streams - backend.streams_in_graphs,
            bytes=None if growth is None else round(growth * MARGIN),
            bytes_left=device.memory_stats().free,
        )

    def __str__(self) -> str:
        streams = "" if self.streams_left is None else f" {self.streams} of {self.streams_left} streams,"
        memory = "" if self.bytes is None else f" about {_mib(self.bytes)} of {_mib(self.bytes_left)} MiB,"
        return f"capturing {self.phase} steps of {self._sizes}:{streams}{memory}".rstrip(",:")

    @property
    def _sizes(self) -> str:
        """The shapes, as text."""
        if self.phase == "decode" and all(shape.queries == 1 for shape in self.shapes):
            return f"{', '.join(str(shape.sequences) for shape in self.shapes)} sequences"
        return f"{', '.join(str(shape.tokens) for shape in self.shapes)} tokens"

    def check(self) -> None:
        """Raise CaptureError if the graphs need more than is available."""
        remedy = "capture fewer sizes: lower compilation.max_capture_size, or shorten compilation.capture_sizes"
        if self.streams_left is not None and self.streams > self.streams_left:
            raise CaptureError(
                f"graphs of {len(self.shapes)} sizes need {self.streams} streams, and {max(self.streams_left, 0)} are "
                "left for graphs",
                remedy,
            )
        if self.bytes is not None and self.bytes > self.bytes_left:
            largest, taken = max(each.tokens for each in self.shapes), _mib(self.bytes)
            raise CaptureError(
                f"graphs of up to {largest} tokens need about {taken} MiB, and {_mib(self.bytes_left)} MiB are free",
                f"{remedy}; or lower cache.num_tokens",
            )


def _mib(number: int) -> str:
    return f"{number / (1 << 20):.1f}"
