"""Checks that an operation's samples and body match its declaration, and that the samples distinguish its axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.ops.declaration.operation import Operation
from hal.ops.declaration.samples import Draw, uncovered_axes
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.operations.calls import (
    clone_tensors,
    first_rows,
    nth_sample,
    reference,
    result_row_dims,
    tensors,
    with_rows,
)
from hal.testing.operations.compared_call import same_bits, storages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = (1e-4, 1e-6)
"""Relative and absolute tolerance: a product of fewer rows may be summed in another order."""


def check_declaration(operation: Operation) -> None:
    """Check samples and body against the declared axes, dtypes, rows, states and mutated arguments.

    Raises:
        AssertionError: the message lists every violation.
    """
    problems = list(_of_samples(operation))
    if not problems:
        problems += uncovered_axes(operation.constraints, operation.samples(Draw()))
        problems += _of_writes(operation)
        problems += _of_state(operation)
        problems += _of_rows(operation)
    if problems:
        raise AssertionError("\n".join([f"{operation.name} violates its declaration:", *problems]))


def _of_samples(operation: Operation) -> Iterator[str]:
    for dtype in DTYPES:
        for number, sample in enumerate(operation.samples(Draw(dtype))):
            reason = operation.constraints.unmet(sample)
            if reason is None:
                results = tree_leaves(reference(operation, clone_tensors(sample)))
                given = [each for each in results if each is not None]
                reason = operation.constraints.unmet_results(sample, given)
            if reason is not None:
                yield f"sample {number} of {dtype}: {reason}"


def _of_writes(operation: Operation) -> Iterator[str]:
    """Check that samples write each argument in ``mutates``, and no other."""
    written: set[str] = set()
    for sample in operation.samples(Draw()):
        given = clone_tensors(sample)
        reference(operation, given)
        names = operation.signature.parameters
        written |= {
            name
            for name, before, after in zip(names, sample, given, strict=True)
            if isinstance(before, Tensor) and not same_bits(before, after)
        }
    for name in sorted(written - set(operation.mutates)):
        yield f"it writes its argument {name}; add {name!r} to `mutates`"
    for name in sorted(set(operation.mutates) - written):
        yield f"`mutates` names its argument {name}, but no sample writes it; remove it, or add such a sample"


def _of_state(operation: Operation) -> Iterator[str]:
    """Check that arguments passed on as state are declared so, and that a fused operation passes on all its states."""
    handed: set[str] = set()
    for sample in operation.samples(Draw()):
        named = dict(zip(operation.signature.parameters, clone_tensors(sample), strict=True))

        def recording(part: Operation, named: dict[str, Any] = named) -> Kernel:
            def call(*args: Any, **kwargs: Any) -> Any:
                given = part.arguments(args, kwargs)
                memory = storages([given[name] for name in part.state])
                handed.update(name for name, value in named.items() if storages(value) & memory)
                return part.reference(*args, **kwargs)

            return call

        with torch.no_grad():
            operation.rebound(recording)(*named.values())
    for name in sorted(handed - set(operation.state)):
        yield f"it passes its argument {name} to another operation as state; add {name!r} to `state`"
    for name in sorted(set(operation.state) - handed) if operation.fused else ():
        yield (
            f"it reads or writes its state {name} directly, which fails on a backend with another cache layout; "
            "pass it to an operation that has it as state"
        )


def _of_rows(operation: Operation) -> Iterator[str]:
    """Check that a row does not depend on other rows: the first row alone has the same result."""
    numbers = with_rows(operation)
    if not numbers and operation.rowwise is not None:
        yield f"no sample has two rows along {operation.rowwise}; add one"
    for form, number in numbers.items():
        sample = nth_sample(operation, number)
        whole = tensors(reference(operation, clone_tensors(sample)))
        try:
            part = tensors(reference(operation, clone_tensors(first_rows(operation, 1, sample))))
        except Exception as error:
            raise AssertionError(
                f"{operation.name} declares rowwise={operation.rowwise!r}, but its body raises for one row: {error}"
            ) from error
        for place, (one, every, dim) in enumerate(zip(part, whole, result_row_dims(operation, whole), strict=True)):
            wanted = every if dim is None else every.narrow(dim, 0, 1)
            if one.shape != wanted.shape or not torch.allclose(one, wanted, *CLOSE):
                yield (
                    f"{form}result {place} of one row along {operation.rowwise} differs from the first row of the "
                    "whole result"
                )
