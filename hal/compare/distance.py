"""How far results are apart: those of one call, by its operation's tolerance, and whole states, by their size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.compare.comparison_results import Error
from hal.ops import Operation


def results_of(returned: Any) -> dict[str, Tensor]:
    """The tensors that an operation returned, named."""
    leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    if len(leaves) == 1:
        return {"result": leaves[0]}
    return {f"result {index}": leaf for index, leaf in enumerate(leaves)}


def error(
    operation: Operation, dtype: torch.dtype, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Error:
    """The worst error of a call's results.

    Args:
        operation: whose tolerance holds. Its absolute part is for results of about unit size: where a row's root mean
            square is larger than 1, it grows with that.
        dtype: that the model computes in.
        found: on any device.
        expected: likewise, by the same names.
    """
    if found.keys() != expected.keys():
        return Error(math.inf, problem=f"it gave {', '.join(found) or 'nothing'} and not {', '.join(expected)}")
    errors = [_error(operation, dtype, name, found[name].cpu(), want.cpu()) for name, want in expected.items()]
    return max(errors, key=lambda each: each.ratio, default=Error(0.0))


def _error(operation: Operation, dtype: torch.dtype, name: str, got: Tensor, want: Tensor) -> Error:
    if got.shape != want.shape or got.dtype != want.dtype:
        return Error(math.inf, name, problem=f"it is {shape_of(got)} and not {shape_of(want)}")
    if not want.numel():
        return Error(0.0, name)
    relative, absolute = operation.tolerance[dtype]
    share = operation.off_by_one.get(dtype, 0.0) if want.dtype == torch.int8 else 0.0
    if not want.is_floating_point():
        relative, absolute = 0.0, 1.0 if share else 0.0
    wide, exact = got.double(), want.double()
    size = exact.square().mean(-1, keepdim=True).sqrt().clamp(min=1.0) if want.is_floating_point() else 1.0
    allowed = absolute * size + relative * exact.abs()
    difference = (wide - exact).abs()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    ratios = torch.where(same, 0.0, difference / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(ratios.argmax())
    ratio = float(ratios.reshape(-1)[place])
    if share and ratio <= 1:
        off, most = int((~same).sum()), 1 + int(share * want.numel())
        if off > most:
            problem = f"{off} of {want.numel()} int8 results are one step off, and {most} may be"
            return Error(off / most, name, problem=problem)
        ratio = off / most
    at = tuple(int(index) for index in torch.unravel_index(torch.tensor(place), want.shape))
    return Error(ratio, name, at, float(wide[at]), float(exact[at]), float(allowed.reshape(-1)[place]))


def drift(found: Tensor, expected: Tensor) -> float:
    """The largest difference in a row of the last dimension, over the row's root mean square in ``expected``."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    wide, exact = found.float(), expected.float()
    same = (wide == exact) | (wide.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (wide - exact).abs()).amax(-1)
    share = torch.where(difference == 0, 0.0, difference / exact.square().mean(-1).sqrt())
    return float(share.nan_to_num(nan=math.inf, posinf=math.inf).max())


def shape_of(value: Any) -> str:
    """How a report shows an argument or a result: ``float32[12, 192]``, or the value."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
