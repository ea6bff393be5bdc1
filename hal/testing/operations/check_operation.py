"""What is demanded of one call of an operation, beside its results."""

from __future__ import annotations

import torch

from hal.drivers.backend import Backend
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.case import Failure
from hal.testing.operations.calls import Call, described, reference, result_row_dims, tensors
from hal.testing.operations.examined import Examined, poison, storages


def check_call(backend: Backend, call: Call, run: Kernel, *, seed: int = 0) -> None:
    """Make a call twice, on two sets of values, and hold results, arguments and memory against the reference.

    Args:
        backend: active.
        call: what to call.
        run: the operation's function on the backend.
        seed: of the values.

    Raises:
        Failure: with everything that is wrong.
    """
    operation, device = call.operation, backend.device
    with torch.inference_mode():
        earlier = Examined(backend, call, seed + 1)
        earlier.run(run)
        poison(earlier.expected, device.torch)
        now = Examined(backend, call, seed)
        now.run(run)
        device.synchronize()
        problems = [*now.problems(), *(f"after a second call: {each}" for each in earlier.problems())]
        shared = storages(now.results) & storages(earlier.results)
        if shared:
            problems.append("two calls gave results in the same memory")
        if problems:
            raise Failure(problems, operation.name, *described(operation, now.wanted))


def check_special(backend: Backend, call: Call, run: Kernel) -> None:
    """A value that is no number shows in its own row, as in the reference, and in no other row.

    Raises:
        Failure: it vanished, or spread.
    """
    operation = call.operation
    with torch.inference_mode():
        wanted = call.arguments("cpu")
        shown = described(operation, wanted)
        expected = tensors(reference(operation, wanted))
        examined = Examined(backend, call, 0)
        examined.run(run)
        backend.device.synchronize()
        problems = []
        dims = result_row_dims(operation, expected)
        for place, (got, want, dim) in enumerate(zip(tensors(examined.results), expected, dims, strict=True)):
            if dim is None or not want.is_floating_point():
                continue
            got, want = got.cpu().movedim(dim, 0), want.movedim(dim, 0)
            if bool((got[0].isfinite() & ~want[0].isfinite()).any()):
                problems.append(f"result {place} is finite where the reference's is not")
            problems += examined.differences(got[1:], want[1:], f"result {place}, in the other rows,")
        if problems:
            raise Failure(problems, operation.name, *shown)


def check_node(backend: Backend, call: Call) -> None:
    """The operation as a node of a graph gives the same, contiguous and in memory of its own.

    Raises:
        Failure: it does not.
    """
    operation = call.operation
    with torch.inference_mode():
        examined = Examined(backend, call, 0)
        examined.run(operation.overload)
        backend.device.synchronize()
        problems = list(examined.problems())
        inputs = storages(examined.given)
        for place, result in enumerate(tensors(examined.results)):
            if storages(result) & inputs:
                problems.append(f"result {place} of the node lies in an argument's memory")
            if not result.is_contiguous():
                problems.append(f"result {place} of the node is not contiguous")
        if problems:
            raise Failure(problems, operation.name, *described(operation, examined.wanted))
