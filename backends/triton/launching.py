"""Launches of kernels that a driver may replace where Triton interprets them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch import Tensor

from .interpreter import INTERPRETED


class Interpreted(Protocol):
    """Launches an interpreted kernel on a device."""

    def __call__(self, operation: str, run: Callable[..., Any], *arguments: Any, written: Collection[Tensor]) -> None:
        """Have the device call ``run(*arguments)`` with CPU tensors over its memory.

        Args:
            operation: the operation's name.
            run: the kernel for its grid.
            arguments: tensors of the device, and other values.
            written: those of the tensors that the kernel writes.
        """


INTERPRETED_ON: dict[str, Interpreted] = {}
"""By device type. Elsewhere, Triton's interpreter copies the whole storage of each tensor to the CPU and back."""


def launch(
    operation: str, kernel: Any, grid: tuple[int, ...], *arguments: Any, written: Collection[Tensor], num_warps: int
) -> None:
    """Launch ``kernel[grid](*arguments)`` on the device of the tensors."""
    device = next(each.device.type for each in arguments if isinstance(each, Tensor))
    if INTERPRETED.value and device in INTERPRETED_ON:
        INTERPRETED_ON[device](operation, kernel[grid], *arguments, written=written)
    else:
        kernel[grid](*arguments, num_warps=num_warps)
