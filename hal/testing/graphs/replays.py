"""Every operation in a graph: a replay on other values gives what the declaration gives for those."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.ops.declaration.operation import Operation
from hal.ops.tolerance import assert_agree
from hal.testing.case import Failure
from hal.testing.operations.calls import Call, described, reference, tensors, widest
from hal.testing.operations.examined import prepared
from hal.testing.target import Target


def check_replay(target: Target, operation: Operation) -> None:
    """Capture a call, write other values into its arguments, replay, and compare.

    Raises:
        Failure: results or arguments that are written are not the reference's.
        NotApplicable: samples do not have the cache's layout.
    """
    backend = target.activated()
    target.require_canonical(operation)
    dtype, names = backend.limits.dtypes[0], list(operation.signature.parameters)
    call = Call(operation, dtype, widest(operation), "replay")
    kept = [names.index(name) for name in operation.weights]
    given = call.arguments(backend.device.torch, 0)
    later, wanted = call.arguments(backend.device.torch, 1), call.arguments("cpu", 1)
    for place in kept:  # their form is the driver's own, so they stay
        wanted[place] = given[place].cpu()
    with torch.inference_mode():
        given = prepared(backend, operation, given, dtype)
        expected = reference(operation, wanted)
    graph = backend.graph()
    outputs = graph.capture(lambda: operation.function(*given))
    with torch.inference_mode():
        for place, (mine, other) in enumerate(zip(given, later, strict=True)):
            if isinstance(mine, Tensor) and place not in kept and names[place] not in operation.host:
                mine.copy_(other)
    graph.replay(**{name: later[names.index(name)] for name in operation.host})
    backend.device.synchronize()
    problems = list(_differences(operation, dtype, outputs, expected, "result"))
    for name in operation.mutates:
        place = names.index(name)
        problems += _differences(operation, dtype, given[place], wanted[place], f"the argument {name}")
    if problems:
        raise Failure([f"after a replay, {each}" for each in problems], operation.name, *described(operation, wanted))


def _differences(operation: Operation, dtype: torch.dtype, found: Any, expected: Any, what: str) -> list[str]:
    try:
        assert_agree(operation, dtype, tensors(found), tensors(expected), what)
    except AssertionError as error:
        return [" ".join(str(error).split())]
    return []
