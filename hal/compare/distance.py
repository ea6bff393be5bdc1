"""How far the results of one call are apart, by its operation's tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.ops import Operation
from hal.ops.rounding import rms
from hal.ops.tolerance import Error, error


def results_of(returned: Any) -> dict[str, Tensor]:
    """Return the tensors that an operation returned, by name."""
    leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    if len(leaves) == 1:
        return {"result": leaves[0]}
    return {f"result {index}": leaf for index, leaf in enumerate(leaves)}


def worst_error(
    operation: Operation, dtype: torch.dtype, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Error:
    """Return the worst error of a call's results. NaN is right where the reference gives it.

    Args:
        operation: sets the tolerance. Its absolute part assumes results of unit size; it grows with a row's RMS if that
            exceeds 1.
        dtype: dtype that the model computes in.
        found: results on any device.
        expected: results with the same names.
    """
    if found.keys() != expected.keys():
        return Error(math.inf, problem=f"it gave {', '.join(found) or 'nothing'} and not {', '.join(expected)}")
    errors = []
    for name, want in expected.items():
        size = rms(want.cpu()).unsqueeze(-1).clamp(min=1.0) if want.is_floating_point() and want.dim() else 1.0
        errors.append(error(operation, dtype, found[name], want, result=name, size=size, equal_nan=True))
    return max(errors, key=lambda each: each.ratio, default=Error(0.0))
