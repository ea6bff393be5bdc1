"""Cases of the kernels that a driver declares invariant: the bits of a row are those of the row in any other call."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from hal import ops
from hal.drivers.backend import Backend
from hal.errors import MissingKernel
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.part_of_call import COUNTS, STARTS, Part, by_expert, on_host, row_count, with_parts, with_rows
from hal.testing.case import Case, Failure, NotApplicable
from hal.testing.compared_call import prepare_weights, same_bits
from hal.testing.operation_calls import Call, clone_tensors, describe, sample_count, tensors
from hal.testing.target import Target, dtype_name

ROWS = (2, 7, 66)
"""Numbers of rows of the calls that are compared, each drawn from the rows of a sample."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``invariance/<operation>/<dtype>`` for each operation in the backend's ``invariant``."""
    if not target.backend.invariant:
        return
    for name in sorted(target.backend.invariant):
        operation = ops.operation(name)
        if operation.collective or (
            operation.rowwise is None and not _of_steps(operation) and not by_expert(operation)
        ):
            continue
        for dtype in target.backend.limits.dtypes:
            yield Case(f"invariance/{name}/{dtype_name(dtype)}", partial(_check, target, operation, dtype))


def _check(target: Target, operation: Operation, dtype: torch.dtype) -> None:
    target.require_canonical(operation)
    backend = target.cached("invariant", lambda: target.open(numerics={"invariant": True}))
    backend.activate()
    refused: list[MissingKernel] = []
    count = sample_count(operation)
    for number in range(count):
        try:
            check_invariant(backend, Call(operation, dtype, number, f"sample-{number}"))
        except MissingKernel as error:
            refused.append(error)
    if len(refused) == count:
        raise NotApplicable(str(refused[0]))


def check_invariant(backend: Backend, call: Call) -> None:
    """Compare the bits of a call's rows with those of the same rows in other calls.

    Raises:
        Failure: they differ.
    """
    operation = call.operation
    with torch.inference_mode():
        given = prepare_weights(backend, operation, call.arguments(backend.device.torch), call.dtype)
        arguments = dict(zip(operation.signature.parameters, given, strict=True))
        problems = [*_of_parts(operation, arguments)] if operation.fused else []
        if _of_steps(operation):
            problems += list(_of_sequences(operation, arguments))
        elif by_expert(operation):
            problems += list(_of_experts(operation, arguments))
        else:
            problems += list(_of_rows(operation, arguments))
        if problems:
            raise Failure(problems, operation.name, *describe(operation, given))


def _of_steps(operation: Operation) -> bool:
    return STARTS in operation.signature.parameters


def _run(operation: Operation, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the results of a call, and the state that it wrote."""
    given = dict(zip(arguments, clone_tensors(arguments.values()), strict=True))
    results = tensors(operation.function(*given.values()))
    return results or [given[name] for name in operation.mutates]


def _rows_of(results: list[torch.Tensor], rows: list[int]) -> list[torch.Tensor]:
    return [each[rows] for each in results]


def _of_parts(operation: Operation, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Compare a fused operation with its body, since a graph may run either."""
    for place, (found, wanted) in enumerate(
        zip(_run(operation, arguments), tensors(operation.body(*clone_tensors(arguments.values()))), strict=True)
    ):
        if not same_bits(found, wanted):
            yield f"result {place} has other bits than the smaller operations': {_apart(found, wanted)}"


def _of_rows(operation: Operation, arguments: Mapping[str, Any]) -> Iterator[str]:
    count = row_count(operation, arguments)
    if count < 2 or operation.mutates:
        return
    alone = [_run(operation, with_rows(operation, arguments, torch.tensor([row]))) for row in range(count)]
    drawn = random.Random(count)
    for number in (*ROWS, count):
        rows = [*range(count)] if number == count else drawn.choices(range(count), k=number)
        several = _run(operation, with_rows(operation, arguments, torch.tensor(rows)))
        for place, found in enumerate(several):
            wanted = torch.cat([alone[row][place] for row in rows])
            if not same_bits(found, wanted):
                yield f"result {place} of {number} rows has other bits than each row alone: {_apart(found, wanted)}"


def _of_experts(operation: Operation, arguments: Mapping[str, Any]) -> Iterator[str]:
    counts: list[int] = arguments[COUNTS].tolist()
    (whole,) = _run(operation, arguments)
    spans = [*pairwise(accumulate((0, *counts)))]
    rows = arguments["x"].shape[0]
    per_row = [name for name, value in arguments.items() if _is_by_row(value, rows) and name in ("x", "x_scale")]
    for size in (1, 2, 5):
        for first in range(max(counts, default=0)):
            chosen = [[*range(start, end)][first : first + size] for start, end in spans]
            flat = [row for each in chosen for row in each]
            part = {name: value[flat] if name in per_row else value for name, value in arguments.items()}
            part[COUNTS] = torch.tensor([len(each) for each in chosen]).to(arguments[COUNTS])
            (found,) = _run(operation, part)
            if not same_bits(found, whole[flat]):
                yield f"{size} rows of each expert have other bits: {_apart(found, whole[flat])}"


def _is_by_row(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows


def _of_sequences(operation: Operation, arguments: Mapping[str, Any]) -> Iterator[str]:
    starts = on_host(arguments, STARTS)
    lengths = [end - start for start, end in pairwise(starts)]
    wholes: list[Part] = [(sequence, 0, length) for sequence, length in enumerate(lengths)]
    if _reads_what_others_write(arguments):
        return
    results = _run(operation, arguments)
    ways = {
        "in another order": [wholes[::-1]],
        "each alone": [[each] for each in wholes],
    }
    if getattr([*arguments.values()][-1], "causal", True) and operation.name != "packed_attention":
        ways |= {f"in chunks of {size}": _chunks(lengths, size) for size in (1, 2, 3, 5)}
    for way, calls in ways.items():
        state = dict(zip(arguments, clone_tensors(arguments.values()), strict=True))
        for parts in calls:
            if not parts:
                continue
            given, tokens = with_parts(operation, state, parts)
            _follow(given, arguments, parts)
            found = tensors(operation.function(*given.values()))
            for place, each in enumerate(found):
                wanted = results[place][tokens]
                if not same_bits(each, wanted):
                    yield f"result {place} of sequences {way} has other bits: {_apart(each, wanted)}"
                    return


def _reads_what_others_write(arguments: Mapping[str, Any]) -> bool:
    """Return whether a sequence reads a slot that another one writes: the result then depends on their order."""
    read, written = arguments.get("read_slots"), arguments.get("write_slots")
    if read is None or written is None:
        return False
    others = [{*slots} for slots in written.tolist()]
    return any(slot in slots for i, slot in enumerate(read.tolist()) for j, slots in enumerate(others) if i != j)


def _follow(given: dict[str, Any], arguments: Mapping[str, Any], parts: list[Part]) -> None:
    """Let each part after a sequence's first read the state that the part before has written."""
    if "read_slots" not in given:
        return
    written = arguments.get("write_slots")
    if written is not None:
        last = given["write_slots"][:, -1]
        later = torch.tensor([first > 0 for _, first, _ in parts]).to(last.device)
        given["read_slots"] = torch.where(later, last, given["read_slots"])


def _chunks(lengths: list[int], size: int) -> list[list[Part]]:
    """Return calls in each of which every sequence has up to ``size`` tokens."""
    return [
        [(s, at, min(at + size, length)) for s, length in enumerate(lengths) if at < length]
        for at in range(0, max(lengths, default=0), size)
    ]


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """Return how many elements differ, and by how much."""
    if found.shape != wanted.shape:
        return f"its shape is {list(found.shape)} instead of {list(wanted.shape)}"
    wrong = found != wanted
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements, by up to {(found.double() - wanted.double()).abs().max():.3g}"
    )
