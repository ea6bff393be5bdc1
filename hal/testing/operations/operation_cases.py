"""Cases of operations: every declaration, and every call of its samples and their variants, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hal import ops
from hal.testing.case import Case
from hal.testing.operations.calls import Call, calls_of, largest_sample, special_calls_of
from hal.testing.operations.check_operation import check_call, check_node, check_special
from hal.testing.operations.declaration_cases import check_declaration
from hal.testing.target import Target, dtype_name


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
