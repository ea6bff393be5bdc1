"""The check that a replay of an operation on new values agrees with the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.ops.declaration.operation import Operation
from hal.ops.tolerance import assert_agree
from hal.testing.case import Failure
from hal.testing.operations.calls import Call, describe, largest_sample, reference, tensors
from hal.testing.operations.compared_call import prepare_weights
from hal.testing.target import Target


def check_replay(target: Target, operation: Operation) -> None:
    """Capture a call, overwrite its arguments, replay the graph and compare with the reference.

    Raises:
        Failure: results or mutated arguments differ from the reference's.
        NotApplicable: the backend's cache layout differs from the samples'.
    """
    backend = target.activated()
    target.require_canonical(operation)
    dtype, names = backend.limits.dtypes[0], list(operation.signature.parameters)
    call = Call(operation, dtype, largest_sample(operation), "replay")
    kept = [names.index(name) for name in operation.weights]
    given = call.arguments(backend.device.torch, 0)
    later, wanted = call.arguments(backend.device.torch, 1), call.arguments("cpu", 1)
    for place in kept:  # weights keep their values: their layout is the driver's
        wanted[place] = None if given[place] is None else given[place].cpu()
    with torch.inference_mode():
        given = prepare_weights(backend, operation, given, dtype)
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
        raise Failure([f"after a replay, {each}" for each in problems], operation.name, *describe(operation, wanted))


def _differences(operation: Operation, dtype: torch.dtype, found: Any, expected: Any, what: str) -> list[str]:
    try:
        assert_agree(operation, dtype, tensors(found), tensors(expected), what)
    except AssertionError as error:
        return [" ".join(str(error).split())]
    return []
