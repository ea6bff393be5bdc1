"""Forms of weights: how their numbers are kept, what a scale covers, and how the other operand is rounded.

A form is data. Operations take it as their options, so that one product serves every number format: a kernel is
registered for the forms that it takes, and the reference follows from the form.

Sources: Open Compute Project, *OCP 8-bit Floating Point Specification*, 2023 (e4m3), and *OCP Microscaling Formats (MX)
Specification*, version 1.0, 2023 (e2m1, e8m0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import attrs
import torch
from torch import Tensor

from hal.errors import OperationError, nearest

INT4S: Final = 8
"""The 4-bit numbers in an int32."""
FLOAT4S: Final = 2
"""The 4-bit numbers in a uint8."""
INPUTS: Final = ("float", "float8", "static_float8", "int8", "static_int8")
"""How a form may round the input of a product."""
SECOND: Final = 4
"""The bytes of a second scale: a float32, after the scales of its row."""


@attrs.frozen(cache_hash=True)
class Form:
    """The form of a weight ``[out_features, in_features]``, and of the input that it is multiplied with.

    Attributes:
        numbers: the kind of its numbers, a name of :class:`Numbers`; ``float`` for floating-point numbers without
            scales, of the dtype of computation.
        rows: the rows that share a scale; 0 for all of them.
        columns: the columns that share a scale; 0 for a whole row. The last block of a row or column may be smaller.
        scales: the kind of the scales: ``float`` for floating-point numbers, ``e8m0`` or ``e4m3`` for the bits of such
            numbers in uint8.
        zero_points: whether numbers may have a zero point other than 0, one for each scale.
        inputs: how the input is rounded: ``float`` for not at all, ``float8`` or ``int8`` per token, by its largest
            element, or ``static_float8`` or ``static_int8`` by the checkpoint's scale and offset.
        ordered: whether the columns may stand in another order than the inputs.
        second: whether scales have a second scale, which multiplies all those of a row; see
            :func:`~hal.ops.forms.with_second`.
    """

    numbers: str = "float"
    rows: int = 1
    columns: int = 0
    scales: str = "float"
    zero_points: bool = False
    inputs: str = "float"
    ordered: bool = False
    second: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse what no product knows.

        Raises:
            OperationError: the scales or inputs are of no known kind, the rows or columns of a scale are negative, or
                there are second scales beside zero points or scales that are no bits.
        """
        for each, kinds in (("scales", SCALES), ("inputs", INPUTS)):
            if (name := getattr(self, each)) not in kinds:
                raise OperationError(f"a form of weights has {each} {name!r}", nearest(str(name), kinds))
        if min(self.rows, self.columns) < 0:
            raise OperationError(
                f"a form of weights has scales of {self.rows} x {self.columns} numbers", "use 0 for all of them"
            )
        if self.second and (self.scales == "float" or self.zero_points):
            raise OperationError(
                f"a form of weights has second scales, scales {self.scales!r} and zero_points {self.zero_points}",
                "use scales e4m3 or e8m0 without zero points",
            )

    def __str__(self) -> str:
        """Return a phrase: ``int4 in groups of 32 with zero points, and int8 inputs``."""
        if self == FLOAT:
            return "float"
        if self.rows == 1:
            covers = f" in groups of {self.columns}" if self.columns else ""
        else:
            covers = f" in blocks of {self.rows or 'all'} x {self.columns or 'all'}"
        zeros = " with zero points" if self.zero_points else " with second scales" if self.second else ""
        inputs = "" if self.inputs == "float" else f", and {self.inputs.replace('_', ' ')} inputs"
        return f"{self.numbers}{covers}{zeros}{inputs}"

    @property
    def kind(self) -> Numbers:
        """How its numbers are kept.

        Raises:
            OperationError: no package declares numbers of this name.
        """
        if (found := _NUMBERS.get(self.numbers)) is None:
            raise OperationError(
                f"no numbers {self.numbers!r} of weights are declared", nearest(self.numbers, _NUMBERS)
            )
        return found

    @property
    def by_row(self) -> bool:
        """Whether a scale covers a row."""
        return self.rows == 1 and self.columns == 0

    @property
    def exact(self) -> bool:
        """Whether products are exact sums of integers: of int8 numbers and inputs, with float scales of rows alone."""
        whole = self.by_row and self.scales == "float" and not self.zero_points
        return self.numbers == "int8" and self.inputs.endswith("int8") and whole

    def group(self, in_features: int) -> int:
        """Return the columns that share a scale, of a weight with so many."""
        return min(self.columns or in_features, max(in_features, 1))

    def blocks(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return how many scales the rows and the columns of a weight have."""
        rows = self.rows or max(out_features, 1)
        return -(-out_features // rows), -(-in_features // self.group(in_features))

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight, with the bytes of second scales."""
        rows, columns = self.blocks(out_features, in_features)
        return rows, columns + SECOND * self.second

    def of_rows(self) -> Form:
        """Return the form of some of a weight's rows, each with its own scales."""
        return self if self.rows == 1 else attrs.evolve(self, rows=1)

    def packed(self, in_features: int) -> int:
        """Return how many elements a row of numbers takes."""
        return -(-in_features // self.kind.count) * self.kind.elements

    def nbytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Return the bytes of a weight, with its scales in float32 and zero points in int8.

        Args:
            out_features: its rows.
            in_features: its columns.
            dtype: that of floating-point numbers.
        """
        if self == FLOAT:
            return out_features * in_features * dtype.itemsize
        rows, columns = self.scale_shape(out_features, in_features)
        of_scale = (4 if self.scales == "float" else 1) + self.zero_points
        return out_features * self.packed(in_features) * self.kind.dtype.itemsize + rows * columns * of_scale

    def width(self, weight: Tensor) -> int:
        """Return the columns of a weight in this form."""
        return weight.shape[-1] // self.kind.elements * self.kind.count


@attrs.frozen(eq=False)
class Numbers:
    """A kind of numbers that weights have.

    Attributes:
        name: its name in forms.
        dtype: the dtype that holds them.
        values: returns the numbers of such a tensor ``[..., width * elements / count]``, float32 ``[..., width]``.
        pack: the inverse, from numbers of any dtype that can be held exactly.
        bits: those of a number.
        count: how many numbers ``elements`` elements hold. A row is filled up with zeros.
        elements: see ``count``.
        least: the least number; None of floating-point ones.
    """

    name: str
    dtype: torch.dtype
    values: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], Tensor]
    bits: int
    count: int = 1
    elements: int = 1
    least: int | None = None


def declare_numbers(numbers: Numbers) -> Numbers:
    """Declare a kind of numbers, so that forms may name it. The module that reads such weights calls it.

    Raises:
        OperationError: the name is taken.
    """
    if numbers.name in _NUMBERS or numbers.name == FLOAT.numbers:
        raise OperationError(f"numbers {numbers.name!r} are already declared", "choose another name")
    _NUMBERS[numbers.name] = numbers
    return numbers


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the 4-bit numbers of int32 ``[..., width]``, int32 ``[..., width * 8]``, from -8 to 7.

    The lowest four bits are the first number.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    # Both expanded, because some devices' shift takes the shape of its first operand, and torch's fake shift fails to
    # expand to symbolic sizes.
    eights = packed.unsqueeze(-1).expand(*packed.shape, INT4S)
    shifted: Tensor = eights >> shifts.expand_as(eights)
    numbers: Tensor = ((shifted & 15) ^ 8) - 8
    return numbers.flatten(-2)


def pack_int4(numbers: Tensor) -> Tensor:
    """Return numbers from -8 to 7, ``[..., width]``, as int32 ``[..., width / 8]``: see :func:`unpack_int4`."""
    eights = (numbers & 15).to(torch.int32).unflatten(-1, (-1, INT4S))
    packed: Tensor = eights[..., 0].clone(memory_format=torch.contiguous_format)
    for place in range(1, INT4S):
        packed |= eights[..., place] << 4 * place
    return packed


def float8_values(bits: Tensor) -> Tensor:
    """Return the numbers of the bits of float8 (e4m3), uint8, in float32."""
    return bits.view(torch.float8_e4m3fn).float()


def float8_bits(x: Tensor) -> Tensor:
    """Return the bits of float8 (e4m3), uint8, nearest to float32 numbers; those beyond 448 become 448."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def float4_values(packed: Tensor) -> Tensor:
    """Return the numbers of float4 (e2m1) in uint8 ``[..., width]``, float32 ``[..., width * 2]``.

    The lowest four bits are the first number.
    """
    bits = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    # The same exponent and mantissa in float8 (e4m3), whose bias is larger by 6.
    return float8_values((bits & 7) << 2 | (bits & 8) << 4) * 64


def _float4_bits(x: Tensor) -> Tensor:
    bits = float8_bits(x.float() / 64)
    bits = (bits >> 2 & 7) | (bits >> 4 & 8)
    return bits[..., ::2] | bits[..., 1::2] << 4


def exponent_values(exponents: Tensor) -> Tensor:
    """Return the powers of two of e8m0, uint8: 2 to their power - 127, float32."""
    return exponents.view(torch.float8_e8m0fnu).float()


_NUMBERS: dict[str, Numbers] = {
    each.name: each
    for each in (
        Numbers("int8", torch.int8, torch.Tensor.float, lambda x: x.to(torch.int8), 8, least=-128),
        Numbers(
            "int4",
            torch.int32,
            lambda packed: unpack_int4(packed).float(),
            lambda x: pack_int4(x.to(torch.int8)),
            4,
            INT4S,
            least=-8,
        ),
        Numbers("float8", torch.uint8, float8_values, float8_bits, 8),
        Numbers("float4", torch.uint8, float4_values, _float4_bits, 4, FLOAT4S),
    )
}
SCALES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"float": torch.Tensor.float, "e8m0": exponent_values, "e4m3": float8_values}
)
"""The values of scales, float32, by the kind that a form names."""
FLOAT: Final = Form()
"""Floating-point numbers without scales."""


def scale_values(scale: Tensor, form: Form) -> Tensor:
    """Return scales in float32. Floating-point ones, as a driver may prepare them, are their values already."""
    if scale.is_floating_point():
        return scale.float()
    if not form.second:
        return SCALES[form.scales](scale)
    second = scale[..., -SECOND:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return SCALES[form.scales](scale[..., :-SECOND].contiguous()) * second


def with_second(scale: Tensor, second: Tensor) -> Tensor:
    """Return scales as a form with second scales keeps them: the bytes of a float32 follow those of each row.

    Args:
        scale: the bits of the scales, uint8 ``[..., rows, columns]``.
        second: what multiplies those of each row, float32 ``[..., rows]``.
    """
    return torch.cat((scale, second.unsqueeze(-1).contiguous().view(torch.uint8)), -1)


def spread(factors: Tensor, form: Form, rows: int, columns: int) -> Tensor:
    """Return the factor of each number of a weight from those of its blocks ``[..., blocks of rows, of columns]``.

    A factor of all rows or columns is returned once, for broadcasting.
    """
    if factors.shape[-2] > 1 and form.rows != 1:
        factors = factors.repeat_interleave(form.rows, -2)[..., :rows, :]
    if factors.shape[-1] > 1 and form.columns != 1:
        factors = factors.repeat_interleave(form.columns, -1)[..., :columns]
    return factors


def dequantize(form: Form, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Return ``(weight - zero_point) * scale``, float32 ``[..., out_features, in_features]``.

    Args:
        form: the form of the weight.
        weight: its numbers, ``[..., out_features, in_features]`` or packed.
        scale: of each block, ``[..., blocks of rows, blocks of columns]``.
        zero_point: as ``scale``, or None.
    """
    values = form.kind.values(weight)
    rows, columns = values.shape[-2:]
    if zero_point is not None:
        values = values - spread(zero_point.float(), form, rows, columns)
    return values * spread(scale_values(scale, form), form, rows, columns)
