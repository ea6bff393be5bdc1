"""What capturing will take of a device, worked out before the first capture, so that it fails early and in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from hal.drivers.backend import Backend
from hal.errors import CaptureError
from hal.step import StepShape

MARGIN = 1.15
"""Graphs that share a pool, captured largest first, take little more than the largest step; this much at most."""


@attrs.frozen
class CaptureBudget:
    """What graphs of some sizes take, beside what there is.

    Attributes:
        phase: ``decode`` or ``prefill``.
        shapes: to capture.
        streams: that their graphs take.
        streams_left: of the device's, for graphs; None if there is no limit.
        bytes: that their graphs take together, estimated from one eager step of the largest; None if the device cannot
            tell what a step takes.
        bytes_left: of the device's memory.
    """

    phase: str
    shapes: tuple[StepShape, ...]
    streams: int
    streams_left: int | None
    bytes: int | None
    bytes_left: int

    @classmethod
    def measure(
        cls, backend: Backend, shapes: Sequence[StepShape], largest_step: Callable[[], Any], *, phase: str = "decode",
        graphs: int = 1,
    ) -> CaptureBudget:  # fmt: skip
        """Run ``largest_step`` once, eagerly, which also warms the device up, and take stock.

        Args:
            backend: that will capture.
            shapes: for which.
            largest_step: a step of the largest shape.
            phase: ``decode`` or ``prefill``.
            graphs: for each shape.
        """
        device, limits = backend.device, backend.limits
        device.synchronize()
        measured, before = device.reset_peak(), device.memory_stats()
        largest_step()
        device.synchronize()
        peak = device.memory_stats().peak
        device.empty_cache()  # graphs have a pool of their own, which cannot use what is left over in others
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
        """The shapes in words."""
        if self.phase == "decode" and all(shape.queries == 1 for shape in self.shapes):
            return f"{', '.join(str(shape.sequences) for shape in self.shapes)} sequences"
        return f"{', '.join(str(shape.tokens) for shape in self.shapes)} tokens"

    def check(self) -> None:
        """Raise CaptureError if it does not fit."""
        remedy = "capture fewer sizes: lower compilation.max_capture_size, or shorten compilation.capture_sizes"
        if self.streams_left is not None and self.streams > self.streams_left:
            raise CaptureError(
                f"graphs of {len(self.shapes)} sizes take {self.streams} streams, and {max(self.streams_left, 0)} are "
                "left for graphs",
                remedy,
            )
        if self.bytes is not None and self.bytes > self.bytes_left:
            largest, taken = max(each.tokens for each in self.shapes), _mib(self.bytes)
            raise CaptureError(
                f"graphs up to {largest} tokens take about {taken} MiB, and {_mib(self.bytes_left)} are free",
                f"{remedy}; or lower cache.num_tokens",
            )


def _mib(number: int) -> str:
    return f"{number / (1 << 20):.1f}"
