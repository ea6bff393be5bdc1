"""Checks of one call of an operation: results, arguments, memory."""

from __future__ import annotations

import torch

from hal.drivers.backend import Backend
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.case import Failure
from hal.testing.operations.calls import Call, describe, reference, result_row_dims, tensors
from hal.testing.operations.compared_call import ComparedCall, poison, storages


def check_call(backend: Backend, call: Call, run: Kernel, *, seed: int = 0) -> None:
    """Make a call twice, on different values, and compare results, arguments and memory with the reference.

    Args:
        backend: active backend.
        call: call to make.
        run: function of the operation on the backend.
        seed: seed of the values.

    Raises:
        Failure: the message lists every violation.
    """
    operation, device = call.operation, backend.device
    with torch.inference_mode():
        earlier = ComparedCall(backend, call, seed + 1)
        earlier.run(run)
        poison(earlier.expected, device.torch)
        now = ComparedCall(backend, call, seed)
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
