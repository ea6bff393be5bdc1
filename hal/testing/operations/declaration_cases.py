"""Declarations: whether samples and the reference are what an operation declares, and the samples tell axes apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.ops.declaration.operation import Operation
from hal.ops.declaration.sample_coverage import lacking
from hal.ops.declaration.samples import Draw
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.operations.calls import copied, first_rows, nth_sample, reference, result_row_dims, tensors, with_rows
from hal.testing.operations.examined import same_bits, storages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = 1e-4
"""Relative: a product of fewer rows may be summed in another order."""


def check_declaration(operation: Operation) -> None:
    """Hold an operation's samples and its reference against its axes, dtypes, rows, state, and what it writes.

    Raises:
        AssertionError: with everything that is wrong.
    """
    problems = list(_of_samples(operation))
    if not problems:
        problems += lacking(operation.constraints, operation.samples(Draw()))
        problems += _of_writes(operation)
        problems += _of_state(operation)
        problems += _of_rows(operation)
    if problems:
        raise AssertionError("\n".join([f"{operation.name} is not as it declares:", *problems]))


def _of_samples(operation: Operation) -> Iterator[str]:
    for dtype in DTYPES:
        for number, sample in enumerate(operation.samples(Draw(dtype))):
            reason = operation.constraints.unmet(sample)
            if reason is None:
                results = tree_leaves(reference(operation, copied(sample)))
                given = [each for each in results if each is not None]
                reason = operation.constraints.unmet_results(sample, given)
            if reason is not None:
                yield f"sample {number} of {dtype}: {reason}"


def _of_writes(operation: Operation) -> Iterator[str]:
    """Each argument that is declared written is, by some sample; no other is by any."""
    written: set[str] = set()
    for sample in operation.samples(Draw()):
        given = copied(sample)
        reference(operation, given)
        names = operation.signature.parameters
        written |= {
            name for name, before, after in zip(names, sample, given, strict=True)
            if isinstance(before, Tensor) and not same_bits(before, after)
        }  # fmt: skip
    for name in sorted(written - set(operation.mutates)):
        yield f"it writes its argument {name}, which `mutates` does not name"
    for name in sorted(set(operation.mutates) - written):
        yield f"`mutates` names its argument {name}, which no sample writes"


def _of_state(operation: Operation) -> Iterator[str]:
    """What an operation hands to another one as state is its own state; a fused one hands all of it on."""
    handed: set[str] = set()
    for sample in operation.samples(Draw()):
        named = dict(zip(operation.signature.parameters, copied(sample), strict=True))

        def noting(part: Operation, named: dict[str, Any] = named) -> Kernel:
            def call(*args: Any, **kwargs: Any) -> Any:
                given = part.arguments(args, kwargs)
                memory = storages([given[name] for name in part.state])
                handed.update(name for name, value in named.items() if storages(value) & memory)
                return part.reference(*args, **kwargs)

            return call

        with torch.no_grad():
            operation.rebound(noting)(*named.values())
    for name in sorted(handed - set(operation.state)):
        yield f"it hands its argument {name} to another operation as state, and `state` does not name it"
    for name in sorted(set(operation.state) - handed) if operation.fused else ():
        yield f"it reads or writes its state {name} by itself, which no backend with a layout of its own would know"


def _of_rows(operation: Operation) -> Iterator[str]:
    """A row does not depend on other rows: those of the first alone are as they were."""
    number = with_rows(operation)
    if number is None:
        if operation.rowwise is not None:
            yield f"no sample has two rows along {operation.rowwise}"
        return
    sample = nth_sample(operation, Draw(), number)
    whole = tensors(reference(operation, copied(sample)))
    try:
        part = tensors(reference(operation, copied(first_rows(operation, 1, sample))))
    except Exception as error:
        raise AssertionError(
            f"{operation.name} declares rowwise={operation.rowwise!r}, and its reference raises for one row: {error}"
        ) from error
    for place, (one, every, dim) in enumerate(zip(part, whole, result_row_dims(operation, whole), strict=True)):
        wanted = every if dim is None else every.narrow(dim, 0, 1)
        if one.shape != wanted.shape or not torch.allclose(one, wanted, CLOSE):
            yield f"result {place} of one row along {operation.rowwise} is not the first row of the result of all"
