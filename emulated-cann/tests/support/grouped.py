"""Groups of rows, and weights in the layouts that grouped products take, for tests of the emulated CANN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch_npu
from torch import Tensor

from .fused_draw import Draw

NZ = 29


@attrs.frozen
class Grouped:
    """Rows of x in groups.

    Attributes:
        ends: where each group ends.
        rows: the rows of x, those beyond the last group too.
        kind: how the list is given: "ends", "counts" or "pairs" (a group and its number of rows, in any order).
    """

    ends: list[int]
    rows: int
    kind: str

    SPREADS = ("random", "all to one", "one row", "short")

    @classmethod
    def drawn(cls, draw: Draw, spread: str, kind: str) -> Grouped:
        """Draw from 2 to 6 groups; some of them have no row."""
        count = draw.between(2, 6)
        counts = [draw.choice([0, 1, 2, 5]) for _ in range(count)]
        if spread in ("all to one", "one row"):
            rows, counts = (7 if spread == "all to one" else 1), [0] * count
            counts[draw.below(count)] = rows
        elif not any(counts):
            counts[0] = 3
        ends = torch.tensor(counts).cumsum(0).tolist()
        return cls(ends, ends[-1] + (3 if spread == "short" else 0), kind)

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def used(self) -> int:
        return self.ends[-1]

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Expert, first row and the row after the last, in the order of the rows."""
        counts = [end - begin for begin, end in zip([0, *self.ends], self.ends, strict=False)]
        order = list(range(self.count))
        if self.kind == "pairs":
            order.reverse()
            order.sort(key=lambda expert: counts[expert] == 0)  # those without rows last
        begin = 0
        for expert in order:
            yield expert, begin, begin + counts[expert]
            begin += counts[expert]

    def experts(self) -> Tensor:
        """The expert of each row that has one."""
        pairs = [(expert, end - begin) for expert, begin, end in self.ranges()]
        experts, counts = torch.tensor(pairs).unbind(1)
        return experts.repeat_interleave(counts)

    def listed(self) -> Tensor:
        """The list, int64: [E], or [E, 2] for pairs."""
        if self.kind == "ends":
            return torch.tensor(self.ends)
        pairs = torch.tensor([[expert, end - begin] for expert, begin, end in self.ranges()])
        return pairs if self.kind == "pairs" else pairs[:, 1].contiguous()

    def arguments(self) -> dict[str, Any]:
        return {"group_list": self.listed().npu(), "group_list_type": ("ends", "counts", "pairs").index(self.kind)}


def rows_of(groups: Grouped, of_group: Callable[[int, int, int], Tensor]) -> Tensor:
    """What a function of an expert, the first row and the row after the last gives, for all groups together."""
    return torch.cat([of_group(*each) for each in groups.ranges()])


def in_layout(weight: Tensor, layout: str) -> Tensor:
    """On the NPU: as it is, transposed in memory, in FRACTAL_NZ, or in FRACTAL_NZ and transposed."""
    if layout == "nz transposed":
        return in_layout(weight.transpose(-1, -2).contiguous(), "nz").transpose(-1, -2)
    if layout == "transposed":
        return weight.transpose(-1, -2).contiguous().npu().transpose(-1, -2)
    if layout == "nz":
        cast = torch_npu.npu_format_cast(weight.npu(), NZ)
        assert torch_npu.get_npu_format(cast) == NZ
        return cast
    return weight.npu()


def on_npu(*tensors: Tensor) -> list[Tensor]:
    return [each.npu() for each in tensors]


def int8s(draw: Draw, *shape: int) -> Tensor:
    return draw.integers(-128, 127, *shape, dtype=torch.int8)


def packed_int4(values: Tensor) -> Tensor:
    """Eight to an int32 along the last dimension, the first in the lowest bits."""
    nibbles = values.unflatten(-1, (-1, 8)).to(torch.int64) & 15
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def nineteen_bits(scale: Tensor) -> Tensor:
    """What is left of a float32 scale once it went through TransQuantParam."""
    return (scale.view(torch.int32) & -8192).view(torch.float32)
