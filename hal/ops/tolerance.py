"""When two results count as the same: one theory for single calls, whole runs and chosen tokens.

Correct implementations of a computation differ by rounding only. Every check is therefore a distance over an allowance
for rounding, and fails above 1. Distances are taken in float64. An allowance comes from one of two places.

**Declared, for one call.** A call rounds a few times, so its operation states the allowance by dtype: ``absolute * size
+ relative * abs(expected)`` for each element (:func:`error`, :func:`assert_agree`). ``size`` is 1, for values of about
unit size. A check whose values are larger gives theirs, since sums of larger terms are rounded by more. A quantised
value near the middle of two steps may go to either: int8 results may be one step off, in at most the declared share.
Other integers, shapes and dtypes are equal. A chain of calls is allowed a multiple.

**Measured, for a run of a model** (:mod:`hal.ops.rounding`). A run rounds too often for a declaration. How far that
takes it depends on the model, its weights, the dtype and the text, so rounding is measured on the same ones:

- ``ReferenceLogits``, where the reference also runs in a wider dtype: the distance between its two runs. A correct run
  is about as far from the wider one. :mod:`hal.testing` and the tests of the NPU measure so.
- ``Disturbance``, where it cannot, since the reference is any backend, with weights in a form of its own: the drift
  between a run and the same run with every result moved by about one rounding. :mod:`hal.compare` measures so.

A measurement is one draw of a distribution with a long tail, so the allowance is a multiple of it: ``Bounds`` or
``DRIFT_RATIO``. More tokens narrow the mean, and permit closer bounds.

**Ties, for a token.** Another token than the reference's is right where rounding decides: where the logits of the two
are no further apart, in either run, than a multiple of the measured rounding.

NaN is never within an allowance, and infinity only where it is expected. A reference with NaN proves nothing, unless a
check wants NaN in the same places (``equal_nan``).
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.ops.declaration.operation import DEFAULT_TOLERANCE, Operation


@attrs.frozen
class Error:
    """How far a result is from what it should be, at its worst element.

    Attributes:
        ratio: the difference in units of what is allowed; above 1 is out of tolerance.
        result: which result, or which argument that the operation writes.
        at: the element.
        found: there, by what is checked.
        expected: there, by the reference.
        allowed: the difference that the tolerance allows there.
        problem: what else is wrong, such as the shape; the numbers are 0 then.
    """

    ratio: float
    result: str = "result"
    at: tuple[int, ...] = ()
    found: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        return self.problem or (
            f"{self.found:.6g} in place of {self.expected:.6g} at {list(self.at)}, {self.ratio:.3g} times as far off "
            f"as the allowed {self.allowed:.2g}"
        )


def error(
    operation: Operation | None, dtype: torch.dtype, found: Tensor, expected: Tensor, *, result: str = "result",
    size: float | Tensor = 1.0, times: float = 1.0, equal_nan: bool = False,
) -> Error:  # fmt: skip
    """Return the worst error of a tensor.

    Args:
        operation: whose tolerance holds; None for the default tolerance.
        dtype: that the call computes in.
        found: on any device.
        expected: the reference's, likewise.
        result: its name.
        size: of the values, which multiplies the absolute tolerance; a number or a tensor that broadcasts.
        times: multiplies the tolerance of floating-point results.
        equal_nan: whether NaN is right where NaN is expected.
    """
    got, want = found.cpu(), expected.cpu()
    if (got.dtype, got.shape, got.layout) != (want.dtype, want.shape, want.layout):
        return Error(math.inf, result, problem=f"it is {shape_of(got)} and not {shape_of(want)}")
    if not want.numel():
        return Error(0.0, result)
    floating = want.is_floating_point()
    relative, absolute = (operation.tolerance if operation is not None else DEFAULT_TOLERANCE)[dtype]
    share = operation.off_by_one.get(dtype, 0.0) if operation is not None and want.dtype == torch.int8 else 0.0
    if not floating:
        relative, absolute, size, times = 0.0, 1.0 if share else 0.0, 1.0, 1.0
    wide, exact = (each.to(torch.float64 if floating else torch.int64) for each in (got, want))
    allowed = times * (absolute * size + relative * exact.abs().double())
    same = (wide == exact) | (wide.isnan() & exact.isnan() & equal_nan)
    ratios = torch.where(same, 0.0, (wide - exact).abs() / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(ratios.argmax())
    ratio = float(ratios.reshape(-1)[place])
    if share and ratio <= 1:
        off, most = int((~same).sum()), 1 + int(share * want.numel())
        if off > most:
            problem = f"{off} of {want.numel()} int8 results are one step off, and {most} may be"
            return Error(off / most, result, problem=problem)
        ratio = off / most
    at = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), want.shape))
    return Error(ratio, result, at, float(wide[at]), float(exact[at]), float(allowed.reshape(-1)[place]))


def assert_agree(
    operation: Operation | None, dtype: torch.dtype, found: Any, expected: Any, what: str = "", *,
    size: float = 1.0, times: float = 1.0, equal_nan: bool = False,
) -> None:  # fmt: skip
    """Demand results that an operation may give where its reference gives ``expected``.

    Args:
        operation: as in :func:`error`, like all that is not here.
        dtype: that its sample was drawn in.
        found: results, or results and arguments: any nest of tensors and other values, tensors on any device.
        expected: the reference's, nested alike. What is not a tensor there must be equal.
        what: is said in the message.

    Raises:
        AssertionError: they differ by more. It is raised by hand, as ``python -O`` leaves out assert statements.
    """
    named = " ".join(each for each in ("" if operation is None else operation.name, what) if each)
    for got, want in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            worst = error(operation, dtype, got, want, size=size, times=times, equal_nan=equal_nan)
            problem = str(worst) if worst.ratio > 1 else ""
        else:
            alike = not isinstance(got, Tensor) and not isinstance(want, Tensor) and bool(got == want)
            problem = "" if alike else f"it is {shape_of(got)} and not {shape_of(want)}"
        if problem:
            raise AssertionError(f"{named or 'results'}, {dtype}: {problem}")


def shape_of(value: Any) -> str:
    """Describe an argument or a result: ``float32[12, 192]``, or the value."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
