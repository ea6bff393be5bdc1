"""The resources that captures need, estimated before the first one, so that they fail early and with a clear error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from hal.drivers.backend import Backend
from hal.errors import CaptureError
from hal.step import StepShape

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
        device.synchronize()
        measured, before = device.reset_peak(), device.memory_stats()
        largest_step()
        device.synchronize()
        peak = device.memory_stats().peak
        device.empty_cache()  # Graphs have a separate pool, which cannot use memory cached for others.
        return cls(
            phase=phase,
            shapes=tuple(shapes),
            streams=len(shapes) * graphs * limits.streams_per_graph,
            streams_left=None if limits.max_streams is None else limits.max_streams - backend.streams_in_graphs,
            bytes=round((peak - before.allocated) * MARGIN) if measured else None,
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
