"""Comparison of results within tolerance, for single calls, whole runs and chosen tokens.

This module compares. An operation declares its tolerance as ``tolerance=`` of :func:`hal.ops.op`; the default is
``DEFAULT_TOLERANCE`` in :mod:`hal.ops.declaration.operation`.

Correct implementations of a computation differ by rounding only. Every check therefore divides a distance by an
allowance for rounding, and fails above 1. Distances are computed in float64. An allowance has one of two sources.

**Declared, for one call.** A call rounds a few times, so its operation declares the allowance by dtype: ``absolute *
size + relative * abs(expected)`` for each element (:func:`error`, :func:`assert_agree`). ``size`` is 1, for values of
about unit size. A check of larger values passes their size, because sums of larger terms are rounded more. A quantized
value near the midpoint of two integers may round to either: int8 results may be off by one, in at most the declared
share. Other integers, shapes and dtypes must be equal. For a chain of calls, the allowance is multiplied.

**Measured, for a run of a model** (:mod:`hal.ops.rounding`). A run rounds too often for a declaration. The effect
depends on the model, its weights, the dtype and the text, so it is measured on the same ones:

- ``ReferenceLogits``, if the reference can also run in a wider dtype: the distance between its two runs. A correct run
  has about the same distance from the wider run. :mod:`hal.testing` and the tests of the NPU use it.
- ``Disturbance``, if it cannot, because the reference is any backend, with prepared weights: the drift between a run
  and the same run with every result perturbed by about one rounding. :mod:`hal.compare` uses it.

A measurement is one draw from a long-tailed distribution, so the allowance is a multiple of it: ``Bounds`` or
``DRIFT_RATIO``. More tokens narrow the mean, and permit closer bounds.

**Ties, for a token.** A token other than the reference's is right if rounding decides between them: if in each run
their logits differ by at most a multiple of the measured rounding.

NaN is never within an allowance, and infinity only where it is expected. A reference with NaN cannot be compared with,
unless a check expects NaN in the same places (``equal_nan``).
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
    """The difference between a result and its expected value, at the worst element.

    Attributes:
        ratio: the difference relative to the allowed one; above 1 is out of tolerance.
        result: the name of the result, or of the argument that the operation writes.
        at: the index of the element.
        found: the element's value.
        expected: the reference's value.
        allowed: the difference that the tolerance allows.
        problem: another difference, such as the shape; the numbers are 0 then.
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
            f"{self.found:.6g} instead of {self.expected:.6g} at {list(self.at)}, {self.ratio:.3g} times the allowed "
            f"difference {self.allowed:.2g}"
        )


def error(
    operation: Operation | None,
    dtype: torch.dtype,
    found: Tensor,
    expected: Tensor,
    *,
    result: str = "result",
    size: float | Tensor = 1.0,
    times: float = 1.0,
    equal_nan: bool = False,
) -> Error:
    """Return the worst error of a tensor.

    Args:
        operation: the operation whose tolerance applies; None for the default tolerance.
        dtype: the compute dtype of the call.
        found: the result, on any device.
        expected: the reference's result, on any device.
        result: the name of the result.
        size: the size of the values, which multiplies the absolute tolerance; a number or a tensor that broadcasts.
        times: factor of the tolerance of floating-point results.
        equal_nan: whether NaN matches an expected NaN.
    """
    got, want = found.cpu(), expected.cpu()
    if (got.dtype, got.shape, got.layout) != (want.dtype, want.shape, want.layout):
        return Error(math.inf, result, problem=f"it is {shape_of(got)} and not {shape_of(want)}")
    if not want.numel():
        return Error(0.0, result)
    floating = want.is_floating_point()
    relative, absolute = (operation.tolerance if operation is not None else DEFAULT_TOLERANCE)[dtype]
    quantized = want.dtype in (torch.int8, torch.uint8)
    share = operation.off_by_one.get(dtype, 0.0) if operation is not None and quantized else 0.0
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
            problem = f"{off} of {want.numel()} quantized results are off by one; at most {most} are allowed"
            return Error(off / most, result, problem=problem)
        ratio = off / most
    at = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), want.shape))
    return Error(ratio, result, at, float(wide[at]), float(exact[at]), float(allowed.reshape(-1)[place]))


def assert_agree(
    operation: Operation | None,
    dtype: torch.dtype,
    found: Any,
    expected: Any,
    what: str = "",
    *,
    size: float = 1.0,
    times: float = 1.0,
    equal_nan: bool = False,
) -> None:
    """Assert that results agree with those of the reference.

    Args:
        operation: see :func:`error`, as for the arguments that are not listed here.
        dtype: the dtype of the sample.
        found: results, or results and arguments: a nest of tensors, on any device, and other values.
        expected: the reference's, in the same nest. Values other than tensors must be equal.
        what: added to the message.

    Raises:
        AssertionError: they differ by more than the tolerance. ``python -O`` does not remove the check.
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
    """Describe an argument or a result, as in ``float32[12, 192]``, or the value of a non-tensor."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
