"""Spellings of the same arithmetic: the numbers of a call as they are computed with, and other calls of equal value.

A reading of a call is another call that gives the same bits for every input. The reason is IEEE 754, or that PyTorch
implements the one by the other. ``1 / x.sqrt()`` is no reading of ``x.rsqrt()``, nor
``x * (1 / 3)`` of ``x / 3``, nor ``x * y.reciprocal()`` of ``x / y``: they round differently.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hal.compile.fx.symbolic_sizes import same_size, value

aten = torch.ops.aten

SCALARS: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor, aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}  # fmt: skip
"""Overloads that PyTorch defines by another, which takes the number in place of a tensor."""
ROUNDED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar})
"""Calls that round their numbers to the dtype that they compute in before they do anything else."""
POWERS: dict[Any, float] = {aten.reciprocal.default: -1.0, aten.sqrt.default: 0.5, aten.rsqrt.default: -0.5}
"""Calls that ``pow`` makes itself, for these exponents. They are compared before any rounding."""
POWER_DTYPES = (torch.float32, torch.float64)
"""For which it does so to the bit. On a CPU, float16 is computed as a power, and bfloat16 is rounded differently."""
RESPELLED = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
    aten.pow.Tensor_Scalar, *SCALARS, *POWERS,
})  # fmt: skip
"""Calls that have, or are, other readings."""


class Reading(NamedTuple):
    """A call that a node can be taken for.

    Attributes:
        target: the overload.
        operands: its arguments one by one, as :func:`operands` gives them.
        node: that is read.
        written: whether this is how the node is written.
    """

    target: Any
    operands: list[Any]
    node: fx.Node
    written: bool

    def compared(self) -> list[Any]:
        """The operands, with numbers that give the same results in the same form."""
        if self.written:
            return _compared(self.node)
        # Of an exponent, the bits count; of what is computed with, those that are left after rounding.
        dtype = value(self.node).dtype if self.target in ROUNDED else None
        return [computed_with(each, dtype) for each in self.operands]


def readings(node: fx.Node) -> Iterator[Reading]:
    """Yield the call of a node as it is written, and every other that gives the same bits."""
    target, given = target_of(node), operands(node)
    yield Reading(target, given, node, True)
    if target in RESPELLED and _keeps_dtype(node):
        for other, arguments in _respelled(target, given, value(node).dtype):
            yield Reading(other, arguments, node, False)


def target_of(node: fx.Node) -> Any:
    """What a node calls; of overloads that PyTorch defines by others, that other."""
    target: Any = node.target
    return SCALARS.get(target, target)


def operands(node: fx.Node) -> list[Any]:
    """A call's arguments one by one, with the defaults that it leaves out; lists as their lengths and their items."""
    return [item for each, _ in _arguments(node) for item in _items(each)]


def computed_with(number: Any, dtype: torch.dtype | None) -> Any:
    """A number as floating arithmetic computes with it; anything else as it is.

    PyTorch computes bfloat16 and float16 in float32, and rounds numbers to that and not to the tensor's dtype: in all
    three 0.1 is ``float32(0.1)``, and ``bfloat16(0.1)`` is another number.

    Args:
        number: as it is written.
        dtype: of the result; None if the number is not rounded first.
    """
    if type(number) not in (int, float) or (abs(number) > 2**53 and type(number) is int):
        return number  # larger integers need not be numbers of float64, and are rounded once on their way to float32
    if dtype in (None, torch.float64):
        return float(number)
    return ctypes.c_float(number).value


def same_number(one: Any, other: Any) -> bool:
    """Whether two operands, perhaps symbolic sizes, are the same: 0.0 is not -0.0, 2 not 2.0, and NaN is NaN."""
    if type(one) is float and type(other) is float:
        alike = one == other and math.copysign(1, one) == math.copysign(1, other)
        return alike or (math.isnan(one) and math.isnan(other))
    return same_size(one, other)


def number_like(given: Any, number: Any) -> Any:
    """``number`` as one of the type of ``given``: an integer as a float, or the reverse; None if it is no such number.

    A node that computes a size stays as it is. A size that no node computes cannot be an argument.
    """
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return None
    if type(number) not in (int, float) or type(given) not in (int, float) or type(number) is type(given):
        return number
    if not math.isfinite(number) or abs(number) > 2**53 or number != int(number):
        return None
    return type(given)(number)


def number_key(number: Any) -> Any:
    """What to look a number up by: 1, 1.0 and True are three, and 0.0 and -0.0 are two."""
    return type(number), repr(number) if type(number) is float else number


def scaled_inverse(node: fx.Node) -> bool:
    """Whether a node is the multiplication in ``number / x``, which PyTorch computes as ``x.reciprocal() * number``."""
    if node.target is not aten.mul.Tensor or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].target is aten.reciprocal.default and type(node.args[1]) in (int, float)


def is_unit_factor(node: fx.Node) -> bool:
    """Whether a node is that multiplication with a number of 1, and nobody else reads the reciprocal."""
    if not scaled_inverse(node) or node.args[1] != 1 or not _keeps_dtype(node):
        return False
    return len(node.args[0].users) == 1  # type: ignore[union-attr]


def _respelled(target: Any, given: list[Any], dtype: torch.dtype) -> Iterator[tuple[Any, list[Any]]]:
    first, *rest = given
    if target in (aten.add.Tensor, aten.sub.Tensor):
        yield from _sums(target, first, *rest)
    elif target is aten.rsub.Tensor:
        yield aten.sub.Tensor, [rest[0], first, rest[1]]
        yield from _sums(aten.sub.Tensor, rest[0], first, rest[1])
    elif target is aten.mul.Tensor and rest[0] is first:
        yield aten.pow.Tensor_Scalar, [first, 2.0]
    elif target in (aten.mul.Tensor, aten.div.Tensor) and _is_power_of_two(rest[0]):
        inverse = aten.div.Tensor if target is aten.mul.Tensor else aten.mul.Tensor
        yield inverse, [first, 1 / rest[0]]
        if rest[0] == -1:
            yield aten.neg.default, [first]
    elif target is aten.neg.default:
        yield aten.mul.Tensor, [first, -1.0]
        yield aten.div.Tensor, [first, -1.0]
    elif target is aten.pow.Tensor_Scalar:
        if _is_number(rest[0]) and rest[0] == 2:
            yield aten.mul.Tensor, [first, first]
        for other, exponent in POWERS.items():
            if rest[0] == exponent and dtype in POWER_DTYPES:
                yield other, [first]
    elif target in POWERS and dtype in POWER_DTYPES:
        yield aten.pow.Tensor_Scalar, [first, POWERS[target]]


def _sums(target: Any, first: Any, second: Any, alpha: Any) -> Iterator[tuple[Any, list[Any]]]:
    """``x - alpha * y`` is ``x + (-alpha) * y``, and the sign of a number may be in either."""
    if not _is_number(alpha):
        return
    other = aten.sub.Tensor if target is aten.add.Tensor else aten.add.Tensor
    yield other, [first, second, -alpha]
    if _is_number(second):
        negative = -float(second)  # -0 would be 0, and x + 0.0 is not x + -0.0
        yield target, [first, negative, -alpha]
        yield other, [first, negative, alpha]
    elif target is aten.sub.Tensor:
        yield aten.rsub.Tensor, [second, first, alpha]
    else:
        yield aten.rsub.Tensor, [second, first, -alpha]


def _is_number(given: Any) -> bool:
    return type(given) is float or (type(given) is int and abs(given) <= 2**53)


def _is_power_of_two(given: Any) -> bool:
    """Whether dividing by a number is multiplying by its inverse, which float16 has, too."""
    return _is_number(given) and abs(math.frexp(given)[0]) == 0.5 and 2**-14 <= abs(given) <= 2**14


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether a node computes in the dtype that its first argument and its result have, and that is floating."""
    first = value(node.args[0]) if node.args else None
    result = value(node)
    return (
        isinstance(first, Tensor)
        and isinstance(result, Tensor)
        and result.dtype == first.dtype
        and result.dtype.is_floating_point
    )


def _compared(node: fx.Node) -> list[Any]:
    """The operands, numbers as they are computed with, where that depends on their value alone."""
    target, result = target_of(node), value(node)
    dtype = result.dtype if isinstance(result, Tensor) else None
    tensors = [value(each) for each in node.all_input_nodes]
    floating = any(isinstance(each, Tensor) and each.dtype.is_floating_point for each in tensors)
    found: list[Any] = []
    for given, declared in _arguments(node):
        if target in ROUNDED:
            # Also of integer tensors: in ``n / 2`` and ``n + 0.5`` both sides become floating first.
            given = computed_with(given, dtype) if dtype is not None and dtype.is_floating_point else given
        elif declared == "float" or (declared in ("number", "Tensor") and floating):
            given = computed_with(given, None)
        found += _items(given)
    return found


def _arguments(node: fx.Node) -> Iterator[tuple[Any, str]]:
    """The arguments of a call, with the defaults that it leaves out, each with the type that it is declared with."""
    if not isinstance(node.target, torch._ops.OpOverload):
        for given in (*node.args, *(each for _, each in sorted(node.kwargs.items()))):
            yield given, ""
        return
    for index, (name, default, declared) in enumerate(_declared(node.target)):
        yield node.args[index] if index < len(node.args) else node.kwargs.get(name, default), declared


@cache
def _declared(target: torch._ops.OpOverload) -> tuple[tuple[str, Any, str], ...]:
    """Of each argument its name, its default and its type, which torch takes long to tell."""
    return tuple(
        (each.name, each.default_value if each.has_default_value() else None,
         str(each.type).removeprefix("Optional[").removesuffix("]"))
        for each in target._schema.arguments
    )  # fmt: skip


def _items(given: Any) -> Iterator[Any]:
    if isinstance(given, (list, tuple)):
        yield f"{len(given)} items"
        for each in given:
            yield from _items(each)
    else:
        yield given
