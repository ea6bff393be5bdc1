"""Helpers that differ in Triton's interpreter, which computes with numpy.

numpy has no bfloat16, so the interpreter holds such values as bit patterns. Tested with Triton 3.6.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in the interpreter: TRITON_INTERPRET was set before this module was imported."""


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Round float32 to ``dtype``, to nearest even. The interpreter would truncate to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        values = tl.where(values == values, nearest, values)
    return values.to(dtype)


@triton.jit
def dot(a, b):
    """Return the matrix product in float32. The interpreter would multiply the bit patterns of bfloat16."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # Full float32 precision; the default is TF32.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def bound(scalar):
    """Return a loop bound as an integer. numpy 2.4 does not convert the interpreter's one-element arrays."""
    if INTERPRETED:
        return tl.cast(scalar, tl.int32).handle.data.item()
    return scalar
