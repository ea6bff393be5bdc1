"""Equivalent calls of arithmetic: numbers as PyTorch computes with them, and calls with bit-identical results.

A reading of a call is another call with the same bits for every input, by IEEE 754 or because PyTorch implements one by
the other. ``1 / x.sqrt()`` is no reading of ``x.rsqrt()``, nor ``x * (1 / 3)`` of ``x / 3``, nor
``x * y.reciprocal()`` of ``x / y``: they round differently.
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
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
"""Overloads that PyTorch implements by another one, with the number in place of a tensor."""
ROUNDED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar})
"""Calls that first round their numbers to the dtype of computation."""
POWERS: dict[Any, float] = {aten.reciprocal.default: -1.0, aten.sqrt.default: 0.5, aten.rsqrt.default: -0.5}
"""Calls that ``pow`` dispatches to for these exponents. The exponents are compared before any rounding."""
POWER_DTYPES = (torch.float32, torch.float64)
"""Dtypes for which these are bit-identical. On a CPU, float16 uses a power, and bfloat16 rounds differently."""
RESPELLED = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.rsub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        *SCALARS,
        *POWERS,
    }
)
"""Calls that have other readings, or are readings of others."""


class Reading(NamedTuple):
    """A call that is equivalent to a node.

    Attributes:
        target: the overload.
        operands: its flattened arguments, as from :func:`operands`.
        node: the node.
        written: whether the node itself makes this call.
    """

    target: Any
    operands: list[Any]
    node: fx.Node
    written: bool

    def compared(self) -> list[Any]:
        """Return the operands, with numbers of equal effect in the same form."""
        if self.written:
            return _compared(self.node)
        # The bits of an exponent matter; of a number in arithmetic, those that remain after rounding.
        dtype = value(self.node).dtype if self.target in ROUNDED else None
        return [computed_with(each, dtype) for each in self.operands]


def readings(node: fx.Node) -> Iterator[Reading]:
    """Yield the call that a node makes, and every other with the same bits."""
    target, given = target_of(node), operands(node)
    yield Reading(target, given, node, True)
    if target in RESPELLED and _keeps_dtype(node):
        for other, arguments in _equivalent_calls(target, given, value(node).dtype):
            yield Reading(other, arguments, node, False)


def target_of(node: fx.Node) -> Any:
    """Return a node's target, or the overload that PyTorch implements it by."""
    target: Any = node.target
    return SCALARS.get(target, target)


def operands(node: fx.Node) -> list[Any]:
    """Return a call's arguments, including defaults. Lists are flattened to their lengths and items."""
    return [item for each, _ in _arguments(node) for item in _items(each)]


def computed_with(number: Any, dtype: torch.dtype | None) -> Any:
    """Return a number as floating-point arithmetic computes with it. Other values are returned unchanged.

    For bfloat16 and float16, PyTorch computes in float32 and rounds numbers to float32, not to the tensor's dtype: in
    all three, 0.1 is ``float32(0.1)``, which differs from ``bfloat16(0.1)``.

    Args:
        number: the number in the call.
        dtype: of the result; None if the number is not rounded first.
    """
    if type(number) not in (int, float) or (abs(number) > 2**53 and type(number) is int):
        return number  # Larger integers may not be float64 values, and are rounded directly to float32.
    if dtype in (None, torch.float64):
        return float(number)
    return ctypes.c_float(number).value


def same_number(one: Any, other: Any) -> bool:
    """Return whether two operands, which may be symbolic, are identical: 0.0 is not -0.0, 2 not 2.0, NaN is NaN."""
    if type(one) is float and type(other) is float:
        alike = one == other and math.copysign(1, one) == math.copysign(1, other)
        return alike or (math.isnan(one) and math.isnan(other))
    return same_size(one, other)


def number_like(given: Any, number: Any) -> Any:
    """Return ``number`` converted between int and float to the type of ``given``, or None if that is inexact.

    A node that computes a size is returned unchanged. A size without a node cannot be an argument.
    """
    if isinstance(number, (torch.SymInt, torch.SymFloat)):
        return None
    if type(number) not in (int, float) or type(given) not in (int, float) or type(number) is type(given):
        return number
    if not math.isfinite(number) or abs(number) > 2**53 or number != int(number):
        return None
    return type(given)(number)


def number_key(number: Any) -> Any:
    """Return a dictionary key for a number that separates 1, 1.0 and True, and 0.0 and -0.0."""
    return type(number), repr(number) if type(number) is float else number


def scaled_inverse(node: fx.Node) -> bool:
    """Return whether a node is the multiplication of ``number / x``, computed as ``x.reciprocal() * number``."""
    if node.target is not aten.mul.Tensor or not isinstance(node.args[0], fx.Node):
        return False
    return node.args[0].target is aten.reciprocal.default and type(node.args[1]) in (int, float)


def is_unit_factor(node: fx.Node) -> bool:
    """Return whether a node is that multiplication, by 1, and the only reader of the reciprocal."""
    if not scaled_inverse(node) or node.args[1] != 1 or not _keeps_dtype(node):
        return False
    return len(node.args[0].users) == 1  # type: ignore[union-attr]


def _equivalent_calls(target: Any, given: list[Any], dtype: torch.dtype) -> Iterator[tuple[Any, list[Any]]]:
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
    """Yield other forms of a sum: ``x - alpha * y`` is ``x + (-alpha) * y``, and a number can take the sign."""
    if not _is_number(alpha):
        return
    other = aten.sub.Tensor if target is aten.add.Tensor else aten.add.Tensor
    yield other, [first, second, -alpha]
    if _is_number(second):
        negative = -float(second)  # The integer -0 is 0, and x + 0.0 differs from x + -0.0.
        yield target, [first, negative, -alpha]
        yield other, [first, negative, alpha]
    elif target is aten.sub.Tensor:
        yield aten.rsub.Tensor, [second, first, alpha]
    else:
        yield aten.rsub.Tensor, [second, first, -alpha]


def _is_number(given: Any) -> bool:
    return type(given) is float or (type(given) is int and abs(given) <= 2**53)


def _is_power_of_two(given: Any) -> bool:
    """Return whether division by a number equals multiplication by its inverse, which float16 can represent too."""
    return _is_number(given) and abs(math.frexp(given)[0]) == 0.5 and 2**-14 <= abs(given) <= 2**14


def _keeps_dtype(node: fx.Node) -> bool:
    """Return whether a node's first argument and its result have the same floating-point dtype."""
    first = value(node.args[0]) if node.args else None
    result = value(node)
    return (
        isinstance(first, Tensor)
        and isinstance(result, Tensor)
        and result.dtype == first.dtype
        and result.dtype.is_floating_point
    )


def _compared(node: fx.Node) -> list[Any]:
    """Return the operands, with numbers as computed with where only their value matters."""
    target, result = target_of(node), value(node)
    dtype = result.dtype if isinstance(result, Tensor) else None
    tensors = [value(each) for each in node.all_input_nodes]
    floating = any(isinstance(each, Tensor) and each.dtype.is_floating_point for each in tensors)
    found: list[Any] = []
    for given, declared in _arguments(node):
        if target in ROUNDED:
            # This includes integer tensors: in ``n / 2`` and ``n + 0.5``, both sides become floating-point first.
            given = computed_with(given, dtype) if dtype is not None and dtype.is_floating_point else given
        elif declared == "float" or (declared in ("number", "Tensor") and floating):
            given = computed_with(given, None)
        found += _items(given)
    return found


def _arguments(node: fx.Node) -> Iterator[tuple[Any, str]]:
    """Yield a call's arguments, including defaults, with their declared types."""
    if not isinstance(node.target, torch._ops.OpOverload):
        for given in (*node.args, *(each for _, each in sorted(node.kwargs.items()))):
            yield given, ""
        return
    for index, (name, default, declared) in enumerate(_declared(node.target)):
        yield node.args[index] if index < len(node.args) else node.kwargs.get(name, default), declared


@cache
def _declared(target: torch._ops.OpOverload) -> tuple[tuple[str, Any, str], ...]:
    """Return the name, the default and the type of each argument, which torch takes long to compute."""
    return tuple(
        (
            each.name,
            each.default_value if each.has_default_value() else None,
            str(each.type).removeprefix("Optional[").removesuffix("]"),
        )
        for each in target._schema.arguments
    )


def _items(given: Any) -> Iterator[Any]:
    if isinstance(given, (list, tuple)):
        yield f"{len(given)} items"
        for each in given:
            yield from _items(each)
    else:
        yield given
