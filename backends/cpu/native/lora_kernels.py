"""Python binding of the C++ kernel of adapters."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.lora import part_runs

from .arguments import DTYPES, Bindings, addresses, empty, integers, require

LORA_KERNELS = ("add_lora",)


class LoraKernels(Bindings):
    """The binding, as :mod:`.kernels` describes them. A token's result does not depend on the other tokens."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._add = self.function("add_lora", c_int64, *[c_void_p] * 7, c_int, *[c_int64] * 7)

    def add_lora(
        self,
        output: Tensor,
        x: Tensor,
        lora_a: Tensor,
        lora_b: Tensor,
        slots: Tensor,
        parts: str,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`hal.ops.add_lora`. It reads the adapters that the tokens have, and no others.

        Raises:
            OperationError: a slot is out of range, or shapes or dtypes differ.
        """
        (tokens, width), (count, num_parts, rank, inputs) = output.shape, lora_a.shape
        runs, size, known = _runs(parts)
        fits = x.shape == (tokens, inputs) and lora_b.shape == (count, rank, width)
        fits = fits and slots.shape == (tokens,) and size == width and known <= num_parts
        fits = fits and output.dtype is x.dtype is lora_a.dtype is lora_b.dtype
        slots = integers(slots, "adapter_slots")
        require(fits, "add_lora", output, x, lora_a, lora_b, indices=(slots,))
        given = tuple(each.contiguous() for each in (output, x, lora_a, lora_b))
        y = empty(output.shape, output) if out is None else out
        wrong = self._add(
            *addresses(*given, slots, runs, y),
            DTYPES[output.dtype],
            *(tokens, inputs, width, count, num_parts, rank, len(runs)),
        )
        if wrong:
            raise OperationError(
                f"add_lora: token {wrong - 1} has slot {int(slots[wrong - 1])}, and there are {count} adapters",
                "check the batch's adapter_slots",
            )
        return y


@cache
def _runs(parts: str) -> tuple[Tensor, int, int]:
    """Return the part and length of each run, ``[runs, 2]``, which captured steps refer to; all lengths; the parts."""
    runs = part_runs(parts)
    if any(part < 0 or size < 0 for part, size in runs):
        raise OperationError(f"add_lora: parts is {parts!r:.70}", "give numbers of 0 or more")
    count, size = 1 + max(part for part, _ in runs), sum(size for _, size in runs)
    return torch.tensor(runs, dtype=torch.int64), size, count
