"""Operations: every one, over its samples and what is derived from them, in every dtype of the backend's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hal import ops
from hal.testing.calls import Call, calls_of, special_calls_of, widest
from hal.testing.case import Case, NotApplicable
from hal.testing.check import check_call, check_node, check_special
from hal.testing.target import Target, dtype_name


def cases(target: Target) -> Iterator[Case]:
    """``operations/<operation>/<dtype>/<call>``."""
    for operation in ops.catalogue().values():
        for dtype in target.backend.limits.dtypes:
            subject = f"operations/{operation.name}/{dtype_name(dtype)}"
            for call in calls_of(operation, dtype):
                yield Case(f"{subject}/{call.variant}", partial(_values, target, call))
            for call in special_calls_of(operation, dtype):
                yield Case(f"{subject}/{call.variant}", partial(_special, target, call))
            yield Case(f"{subject}/node", partial(_node, target, Call(operation, dtype, widest(operation), "node")))


def _values(target: Target, call: Call) -> None:
    _require_canonical(target, call)
    check_call(target.activated(), call, call.operation.function)


def _special(target: Target, call: Call) -> None:
    _require_canonical(target, call)
    check_special(target.activated(), call, call.operation.function)


def _node(target: Target, call: Call) -> None:
    _require_canonical(target, call)
    check_node(target.activated(), call)


def _require_canonical(target: Target, call: Call) -> None:
    layout = target.backend.cache_layout
    if layout != "canonical" and "key_cache" in call.operation.signature.parameters:
        raise NotApplicable(f"the cache's layout is {layout}, which samples do not have; runners and models do")
