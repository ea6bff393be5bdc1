"""What differs under Triton's interpreter, so that elsewhere kernels read as they compile.

It computes with numpy, which has no bfloat16: values of it are held as bit patterns. Tried with Triton 3.6.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in the interpreter: whether TRITON_INTERPRET was set before this was imported."""


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 to ``dtype``, to nearest, half to even. The interpreter would cut off bfloat16's missing bits."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        values = tl.where(values == values, nearest, values)
    return values.to(dtype)


@triton.jit
def dot(a, b):
    """The matrix product, in float32. The interpreter would multiply bfloat16's bit patterns."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # Of float32 all digits count; by default they would be cut to TF32's.
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def bound(scalar):
    """A loop's bound. The interpreter has scalars in arrays of one element, which numpy 2.4 takes for no integer."""
    if INTERPRETED:
        return tl.cast(scalar, tl.int32).handle.data.item()
    return scalar
