"""Fake implementations: the results of an operation for fake tensors, as in a trace.

The declared axes and dtypes say most of them. Where a declaration leaves a size open, such as that of gathered tokens,
the reference implementation computes the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hal.ops.declaration.constraints import Constraints

Kernel = Callable[..., Any]


def fake_of(constraints: Constraints, host: Sequence[str], reference: Kernel) -> Kernel:
    """Return the fake implementation of an operation. Its outputs are contiguous, and alias nothing.

    Args:
        constraints: the declared axes and dtypes.
        host: the arguments on the host.
        reference: computes the results of calls of which the declaration leaves a size or dtype open, or which violate
            it, and then says how.
    """

    def fake(*args: Any) -> Any:
        derived = constraints.derived_results(args)
        if derived is None:
            mode = next((each.fake_mode for each in args if hasattr(each, "fake_mode")), None)
            environment = None if mode is None else mode.shape_env
            # Conditions of the reference on sizes must not become guards: a kernel has none.
            with nullcontext() if environment is None else environment.suppress_guards():
                return reference(*args)
        given = zip(constraints.arguments, args, strict=False)
        device = next((each.device for name, each in given if isinstance(each, Tensor) and name not in host), None)
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in derived)
        return results[0] if len(results) == 1 else results or None

    return fake
