"""A call on a backend beside the same on the reference, and all that can be wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.drivers.backend import Backend
from hal.nn import WeightUse
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.ops.tolerance import error
from hal.testing.case import Failure
from hal.testing.operations.calls import Call, copied, described, reference, tensors

MARGIN = 64
"""Elements before and behind an argument that is written, which must stay as they are."""


def prepared(backend: Backend, operation: Operation, given: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The arguments of a call, with weights as a model's are after loading."""
    values = dict(zip(operation.signature.parameters, given, strict=True))
    for name in operation.weights:
        if values[name] is not None:
            values[name] = backend.prepare_weight(values[name].clone(), WeightUse(operation.name, name, dtype))
    return list(values.values())


class Examined:
    """A call on a backend beside the same on the reference."""

    def __init__(self, backend: Backend, call: Call, seed: int) -> None:
        self.operation, self.dtype = call.operation, call.dtype
        self.wanted = call.arguments("cpu", seed)
        self.unscaled = _largest(reference(self.operation, Call(call.operation, call.dtype, call.number, "")
                                           .arguments("cpu", seed)))  # fmt: skip
        self.before = copied(self.wanted)
        self.expected = reference(self.operation, self.wanted)
        self.backend = backend
        self.given, self.margins = self._guarded(call.arguments(backend.device.torch, seed))
        self.held = [value.cpu().clone() if isinstance(value, Tensor) else value for value in self.given]
        self.results: Any = None

    def run(self, run: Kernel) -> None:
        """Call it.

        Raises:
            Failure: it raised an exception, which is the failure's cause.
        """
        arguments = self._prepared()
        try:
            self.results = run(*arguments)
        except Exception as error:
            said = f"it raised {type(error).__name__}: {error}"
            raise Failure([said], self.operation.name, *described(self.operation, self.wanted)) from error

    def _prepared(self) -> list[Any]:
        return prepared(self.backend, self.operation, self.given, self.dtype)

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
        """All that is wrong, a sentence each."""
        yield from self._of_results()
        for name, held, now, before, right in zip(
            self.operation.signature.parameters, self.held, self.given, self.before, self.wanted, strict=True
        ):
            if not isinstance(held, Tensor):
                continue
            if name not in self.operation.mutates:
                if not same_bits(now, held):
                    yield f"it changed the argument {name}, which is not declared mutated"
                continue
            kept = _bits(right) == _bits(before)
            if not bool((_bits(now) == _bits(held))[kept].all()):
                yield f"it wrote into {name} where the declaration does not"
            yield from self.differences(now, right, f"the argument {name}")
        if not all(bool((each == 7).all()) for each in self.margins):
            yield "it wrote beyond the ends of an argument"

    def _of_results(self) -> Iterator[str]:
        found, wanted = tree_leaves(self.results), tree_leaves(self.expected)
        if len(found) != len(wanted):
            yield f"it gave {len(found)} results, and {len(wanted)} are declared"
            return
        for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
            what = f"result {place}"
            if not isinstance(want, Tensor):
                if got is not None:
                    yield f"{what} is {got!r:.60}, and none is declared"
                continue
            if not isinstance(got, Tensor):
                yield f"{what} is a {type(got).__name__}, and a tensor is declared"
                continue
            yield from self.differences(got, want, what)
            yield from self._shared(got, want, what)

    def differences(self, got: Tensor, want: Tensor, what: str) -> Iterator[str]:
        largest = _largest(want)
        grown = max(1.0, largest / self.unscaled) if self.unscaled else 1.0
        worst = error(self.operation, self.dtype, got, want, size=grown, equal_nan=True)
        if worst.ratio > 1:
            yield f"{what} is off: {worst}"

    def _shared(self, got: Tensor, want: Tensor, what: str) -> Iterator[str]:
        """Results share memory with arguments, or each other, only where the declaration's do."""
        for name, mine, reference_s in zip(self.operation.signature.parameters, self.given, self.wanted, strict=True):
            if storages(got) & storages(mine) and not storages(want) & storages(reference_s):
                yield f"{what} lies in the memory of the argument {name}"
        others = [each for each in tensors(self.results) if each is not got]
        their_others = [each for each in tensors(self.expected) if each is not want]
        if any(overlap(got, each) for each in others) and not any(overlap(want, each) for each in their_others):
            yield f"{what} has elements in common with another result"


def poison(like: Any, device: torch.device) -> None:
    """Leave NaN in the memory that results of these shapes will be made in, so that what is not written shows."""
    held = []
    for each in tensors(like):
        nbytes = each.numel() * each.element_size()
        held += [torch.full((nbytes,), 255, dtype=torch.uint8, device=device) for _ in range(3) if nbytes]
    del held


def storages(values: Any) -> set[int]:
    """Where the memory of all strided tensors that have any begins."""
    return {
        each.untyped_storage().data_ptr() for each in tensors(values) if each.layout is torch.strided and each.numel()
    }


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have elements in common; parts of one buffer may well lie beside each other."""
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
    """Whether two tensors hold the same, NaN included."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().contiguous().view(kinds[tensor.element_size()])


def _largest(values: Any) -> float:
    floats = [each for each in tensors(values) if each.is_floating_point() and each.numel()]
    return max((float(each.float().nan_to_num(0, 0, 0).abs().max()) for each in floats), default=0.0)
