"""Cases of operations: every declaration, and every call of its samples and their variants, in every dtype.

A declaration is checked against its samples and body; a call by its results, arguments and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal import ops
from hal.drivers.backend import Backend
from hal.ops.declaration.constraints import Draw, uncovered_axes
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.case import Case, Failure
from hal.testing.compared_call import ComparedCall, poison, same_bits, storages
from hal.testing.operation_calls import (
    Call,
    calls_of,
    clone_tensors,
    describe,
    first_rows,
    largest_sample,
    nth_sample,
    reference,
    result_row_dims,
    special_calls_of,
    tensors,
    with_rows,
)
from hal.testing.target import Target, dtype_name

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CLOSE = (1e-4, 1e-6)
"""Relative and absolute tolerance: a product of fewer rows may be summed in another order."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``operations/<operation>/declaration`` and ``operations/<operation>/<dtype>/<call>``."""
    for operation in ops.catalogue().values():
        yield Case(f"operations/{operation.name}/declaration", partial(check_declaration, operation))
        for dtype in target.backend.limits.dtypes:
            subject = f"operations/{operation.name}/{dtype_name(dtype)}"
            for call in calls_of(operation, dtype):
                yield Case(f"{subject}/{call.variant}", partial(_values, target, call))
            for call in special_calls_of(operation, dtype):
                yield Case(f"{subject}/{call.variant}", partial(_special, target, call))
            yield Case(
                f"{subject}/node", partial(_node, target, Call(operation, dtype, largest_sample(operation), "node"))
            )


def _values(target: Target, call: Call) -> None:
    target.require_canonical(call.operation)
    check_call(target.activated(), call, call.operation.function)


def _special(target: Target, call: Call) -> None:
    target.require_canonical(call.operation)
    check_special(target.activated(), call, call.operation.function)


def _node(target: Target, call: Call) -> None:
    target.require_canonical(call.operation)
    check_node(target.activated(), call)


def check_call(backend: Backend, call: Call, run: Kernel) -> None:
    """Make a call twice, on different values, and compare results, arguments and memory with the reference.

    Args:
        run: function of the operation on the backend.

    Raises:
        Failure: the message lists every violation.
    """
    operation, device = call.operation, backend.device
    with torch.inference_mode():
        earlier = ComparedCall(backend, call, 1)
        earlier.run(run)
        poison(earlier.expected, device.torch)
        now = ComparedCall(backend, call, 0)
        now.run(run)
        device.synchronize()
        problems = [*now.problems(), *(f"after a second call: {each}" for each in earlier.problems())]
        shared = storages(now.results) & storages(earlier.results)
        if shared:
            problems.append("two calls returned results in the same memory")
        if problems:
            raise Failure(problems, operation.name, *describe(operation, now.wanted))


def check_special(backend: Backend, call: Call, run: Kernel) -> None:
    """Check that NaN or infinity appears in its row, as in the reference, and in no other row.

    Raises:
        Failure: the value vanished, or spread to another row.
    """
    operation = call.operation
    with torch.inference_mode():
        wanted = call.arguments("cpu")
        shown = describe(operation, wanted)
        expected = tensors(reference(operation, wanted))
        compared = ComparedCall(backend, call, 0)
        compared.run(run)
        backend.device.synchronize()
        problems = []
        dims = result_row_dims(operation, expected)
        for place, (got, want, dim) in enumerate(zip(tensors(compared.results), expected, dims, strict=True)):
            if dim is None or not want.is_floating_point():
                continue
            got, want = got.cpu().movedim(dim, 0), want.movedim(dim, 0)
            if bool((got[0].isfinite() & ~want[0].isfinite()).any()):
                problems.append(f"result {place} is finite where the reference's is not")
            problems += compared.differences(got[1:], want[1:], f"result {place}, in the other rows,")
        if problems:
            raise Failure(problems, operation.name, *shown)


def check_node(backend: Backend, call: Call) -> None:
    """Check that the operation's graph node computes the same, and that its results are contiguous and alias no input.

    Raises:
        Failure: the results differ, alias an input or are not contiguous.
    """
    operation = call.operation
    with torch.inference_mode():
        compared = ComparedCall(backend, call, 0)
        compared.run(operation.node)
        backend.device.synchronize()
        problems = list(compared.problems())
        inputs = storages(compared.given)
        for place, result in enumerate(tensors(compared.results)):
            if storages(result) & inputs:
                problems.append(f"result {place} of the node aliases an argument")
            if not result.is_contiguous():
                problems.append(f"result {place} of the node is not contiguous")
        if problems:
            raise Failure(problems, operation.name, *describe(operation, compared.wanted))


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
