"""A call on a backend and the same call on the reference, and the differences between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.drivers.backend import Backend
from hal.nn import WeightUse
from hal.ops.declaration.operation import Operation
from hal.ops.forms import FLOAT
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.tolerance import error
from hal.testing.case import Failure
from hal.testing.operation_calls import Call, clone_tensors, describe, reference, tensors

MARGIN = 64
"""Guard elements before and after a mutated argument; a kernel must not write them."""


def prepare_weights(backend: Backend, operation: Operation, given: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return the arguments with weights in the backend's form, as after loading a model."""
    values = dict(zip(operation.signature.parameters, given, strict=True))
    form = given[-1] if operation.takes_forms else FLOAT
    if form == FLOAT and operation.prepared_as != operation.name:
        return list(given)  # a table in floating point is looked up as it was loaded
    weights = {name: values[name].clone() for name in operation.weights if values[name] is not None}
    together = [weights] if form != FLOAT else [{name: each} for name, each in weights.items()]
    for each in together:
        values |= backend.prepare_weights(each, WeightUse(operation.prepared_as, dtype, form))
    return list(values.values())


class ComparedCall:
    """A call on a backend and the same call on the reference."""

    def __init__(self, backend: Backend, call: Call, seed: int) -> None:
        self.operation, self.dtype = call.operation, call.dtype
        self.wanted = call.arguments("cpu", seed)
        self.unscaled = _largest(
            reference(self.operation, Call(call.operation, call.dtype, call.number, "").arguments("cpu", seed))
        )
        self.before = clone_tensors(self.wanted)
        self.expected = reference(self.operation, self.wanted)
        self.backend = backend
        self.given, self.margins = self._guarded(call.arguments(backend.device.torch, seed))
        self.held = [value.cpu().clone() if isinstance(value, Tensor) else value for value in self.given]
        self.results: Any = None

    def run(self, run: Kernel) -> None:
        """Call ``run`` with prepared weights.

        Raises:
            Failure: the call raised an exception, which is the cause of the failure.
        """
        arguments = prepare_weights(self.backend, self.operation, self.given, self.dtype)
        try:
            self.results = run(*arguments)
        except Exception as error:
            problem = f"it raised {type(error).__name__}: {error}"
            raise Failure([problem], self.operation.name, *describe(self.operation, self.wanted)) from error

    def _guarded(self, arguments: list[Any]) -> tuple[list[Any], list[Tensor]]:
        margins = []
        for place, name in enumerate(self.operation.signature.parameters):
            if name in self.operation.mutates:
                value = arguments[place]
                whole = value.new_full((value.numel() + 2 * MARGIN,), 7)
                inside = whole[MARGIN:-MARGIN].view(value.shape)
                inside.copy_(value)
                arguments[place] = inside
                margins += [whole[:MARGIN], whole[-MARGIN:]]
        return arguments, margins

    def problems(self) -> Iterator[str]:
        """Yield one sentence per violation."""
        yield from self._of_results()
        for name, held, now, before, right in zip(
            self.operation.signature.parameters, self.held, self.given, self.before, self.wanted, strict=True
        ):
            if not isinstance(held, Tensor):
                continue
            if name not in self.operation.mutates:
                if not same_bits(now, held):
                    yield f"it changed the argument {name}, which `mutates` does not name"
                continue
            kept = _bits(right) == _bits(before)
            if not bool((_bits(now) == _bits(held))[kept].all()):
                yield f"it wrote elements of {name} that the reference does not write"
            yield from self.differences(now, right, f"the argument {name}")
        if not all(bool((each == 7).all()) for each in self.margins):
            yield "it wrote outside the bounds of an argument"

    def _of_results(self) -> Iterator[str]:
        found, wanted = tree_leaves(self.results), tree_leaves(self.expected)
        if len(found) != len(wanted):
            yield f"it returned {len(found)} results; {len(wanted)} are declared"
            return
        for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
            what = f"result {place}"
            if not isinstance(want, Tensor):
                if got is not None:
                    yield f"{what} is {got!r:.60}; None is declared"
                continue
            if not isinstance(got, Tensor):
                yield f"{what} is a {type(got).__name__}; a tensor is declared"
                continue
            yield from self.differences(got, want, what)
            yield from self._aliases(got, want, what)

    def differences(self, got: Tensor, want: Tensor, what: str) -> Iterator[str]:
        largest = _largest(want)
        grown = max(1.0, largest / self.unscaled) if self.unscaled else 1.0
        worst = error(self.operation, self.dtype, got, want, size=grown, equal_nan=True)
        if worst.ratio > 1:
            yield f"{what} is off: {worst}"

    def _aliases(self, got: Tensor, want: Tensor, what: str) -> Iterator[str]:
        """Yield aliases between a result and arguments or other results that the reference does not have."""
        for name, mine, reference_s in zip(self.operation.signature.parameters, self.given, self.wanted, strict=True):
            if storages(got) & storages(mine) and not storages(want) & storages(reference_s):
                yield f"{what} aliases the argument {name}"
        others = [each for each in tensors(self.results) if each is not got]
        reference_others = [each for each in tensors(self.expected) if each is not want]
        if any(share_elements(got, each) for each in others) and not any(
            share_elements(want, each) for each in reference_others
        ):
            yield f"{what} shares elements with another result"


def poison(like: Any, device: torch.device) -> None:
    """Fill freed memory of these sizes with NaN, so that elements that a kernel does not write are detected."""
    held = []
    for each in tensors(like):
        nbytes = each.numel() * each.element_size()
        held += [torch.full((nbytes,), 255, dtype=torch.uint8, device=device) for _ in range(3) if nbytes]
    del held


def storages(values: Any) -> set[int]:
    """Return the addresses of the storages of all non-empty strided tensors in a nested structure."""
    return {
        each.untyped_storage().data_ptr() for each in tensors(values) if each.layout is torch.strided and each.numel()
    }


def share_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors overlap in memory; disjoint views of one storage do not."""
    if not storages(one) & storages(other):
        return False
    places = []
    for each in (one, other):
        size = each.element_size()
        numbers = torch.arange(each.untyped_storage().nbytes() // size)
        first = numbers.as_strided(each.shape, each.stride(), each.storage_offset()).flatten() * size
        places.append({byte for start in first.tolist() for byte in range(start, start + size)})
    return bool(places[0] & places[1])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are bitwise equal, NaN included."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().contiguous().view(kinds[tensor.element_size()])


def _largest(values: Any) -> float:
    floats = [each for each in tensors(values) if each.is_floating_point() and each.numel()]
    return max((float(each.float().nan_to_num(0, 0, 0).abs().max()) for each in floats), default=0.0)
