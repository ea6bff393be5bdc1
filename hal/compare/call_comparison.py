"""Comparison of single calls: both backends' kernels get the same arguments, so earlier differences do not count.

Both backends run each step on the same tokens, the second one first. Their calls are matched by order. For each call of
the first backend, the second one's kernel gets the same arguments, copied to its device with their strides, except:

- A weight is the second model's, which its backend may have prepared: the one that the matching call received.
- The KV cache is a third one, on the second backend. Only its kernel for ``store_kv_cache`` writes it, from the keys
  and values of the first run. So both attentions read the same keys and values, in any cache layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hal.compare.comparison_results import Call, CompareError, Outcome
from hal.compare.texts import fill
from hal.drivers.backend import Backend
from hal.errors import HalError
from hal.execution.runner import Runner
from hal.nn import CausalLM
from hal.ops import Operation
from hal.ops.rounding import rms
from hal.ops.tolerance import Error, error, shape_of


@attrs.frozen(eq=False)
class Side:
    """A backend, its model and its runner."""

    backend: Backend
    model: CausalLM
    runner: Runner


@attrs.frozen(eq=False)
class Evidence:
    """A call in full: each side's arguments before the call, and both results, on the CPU."""

    call: Call
    operation: Operation
    first_arguments: dict[str, Any]
    second_arguments: dict[str, Any]
    first_results: dict[str, Tensor]
    second_results: dict[str, Tensor]


class CallRecorder:
    """Records the second backend's run of a step: the operations that it calls, and their weights and caches."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._own = _tensors_of(side.model)
        self.calls: list[tuple[Call, dict[str, Any]]] = []

    def __call__(self, call: Call, operation: Operation, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the kernel and record the call."""
        given = operation.arguments(args, {})
        self.calls.append((call, {name: value for name, value in given.items() if id(value) in self._own}))
        return _blaming(self._side.backend, call, kernel, args)


class CallComparer:
    """Compares each call of the first backend's run with the second one's kernel.

    Args:
        first: the reference.
        second: the other backend.
        keep: whether to keep :attr:`evidence`, which copies mutated arguments.

    Attributes:
        recorded: the second backend's run of the same step.
        outcomes: outcomes of the calls so far.
        broken: the first outcome that is out of tolerance.
        not_compared: operation to reason, for results that cannot be compared.
    """

    def __init__(self, first: Side, second: Side, *, keep: bool) -> None:
        self._first, self._second, self._keep = first, second, keep
        self._dtype = first.runner.spec.dtype
        self._own, self._their_own_tensors = _tensors_of(first.model), _tensors_of(second.model)
        self._mirror = second.backend.allocate(second.runner.spec)
        fill(self._mirror)
        self._caches = {
            id(ours): mirrored
            for (_, ours), (_, mirrored) in zip(first.runner.states.tensors(), self._mirror.tensors(), strict=True)
        }
        alike = first.backend.state_layout == second.backend.state_layout
        self._unlike_caches = frozenset() if alike else {*self._caches, *map(id, self._caches.values())}
        self.recorded: list[tuple[Call, dict[str, Any]]] = []
        self.outcomes: list[Outcome] = []
        self.broken: Outcome | None = None
        self.evidence: Evidence | None = None
        self.not_compared: dict[str, str] = {}

    def __call__(self, call: Call, operation: Operation, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run both kernels and compare their results."""
        first, second = self._first.backend, self._second.backend
        own = self._recorded_weights(call)
        ours = operation.arguments(args, {})
        theirs = {name: self._counterpart(operation, name, value, own) for name, value in ours.items()}
        kept = self._keep and self.broken is None
        ours_before = _on_cpu(_plain(ours, first, self._own)) if kept else {}
        theirs_before = _on_cpu(_plain(theirs, second, self._their_own_tensors)) if kept else {}
        returned = kernel(*args)
        their_kernel = getattr(second.ops, operation.name)
        with second.translating_errors(), torch.inference_mode():
            answered = _blaming(second, call, their_kernel, tuple(theirs.values()))
            expected, found = self._results(operation, ours, returned), self._results(operation, theirs, answered)
            worst = worst_error(operation, self._dtype, found, expected)
        outcome = Outcome(
            call,
            worst,
            {name: shape_of(value) for name, value in ours.items()},
            tuple(shape_of(result) for result in expected.values()),
        )
        self.outcomes.append(outcome)
        if worst.ratio > 1 and self.broken is None:
            self.broken = outcome
            if kept:
                results = _on_cpu(expected), _on_cpu(found)
                self.evidence = Evidence(call, operation, ours_before, theirs_before, *results)
        return returned

    def _recorded_weights(self, call: Call) -> dict[str, Any]:
        match, own = self.recorded[call.number] if call.number < len(self.recorded) else (None, {})
        if match is None or (match.operation, match.path) != (call.operation, call.path):
            found = "no call" if match is None else f"{match.operation} in {match.path}"
            raise CompareError(
                f"call {call.number} of step {call.step} is {call.operation} in {call.path} on "
                f"{self._first.backend.name}, and {found} on {self._second.backend.name}",
                "compare backends on which the model calls the same operations",
            )
        return own

    def _counterpart(self, operation: Operation, name: str, value: Any, own: Mapping[str, Any]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (mirrored := self._caches.get(id(value))) is not None:
            return mirrored
        if id(value) in self._own and name in own:
            return own[name]
        host = name in operation.host
        (plain,) = _plain({name: value}, self._first.backend, self._own).values()
        return transplant(plain, torch.device("cpu") if host else self._second.backend.device.torch)

    def _results(self, operation: Operation, arguments: Mapping[str, Any], returned: Any) -> dict[str, Tensor]:
        """Return the tensors that a call returned or mutated, by name."""
        written = {}
        for name in operation.mutates:
            if id(arguments[name]) not in self._unlike_caches:
                written[name] = arguments[name]
                continue
            self.not_compared[operation.name] = (
                f"{operation.name}: {self._first.backend.name} and {self._second.backend.name} have different cache "
                "layouts; the attention that reads the cache is compared instead"
            )
        return results_of(returned) | written


def transplant(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device`` with the same strides, because a kernel may handle strides wrongly."""
    copy = memory_of(tensor).to(device, copy=True)
    return copy if tensor.is_contiguous() else copy.as_strided(tensor.shape, tensor.stride())


def memory_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as it is; else the memory from its first to its last element, in one dimension."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,), tensor.storage_offset())


def _on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    cpu = torch.device("cpu")
    return {name: transplant(each, cpu) if isinstance(each, Tensor) else each for name, each in values.items()}


def _plain(values: Mapping[str, Any], backend: Backend, own: Collection[int]) -> dict[str, Any]:
    """Return the values with the weights in ``own`` converted to plain tensors."""
    return {name: backend.plain_weight(each) if id(each) in own else each for name, each in values.items()}


def _tensors_of(model: CausalLM) -> frozenset[int]:
    """Return the ids of a model's tensors; a packed weight has no address, and modules pass the same objects."""
    return frozenset(map(id, [*model.parameters(), *model.buffers()]))


def _blaming(backend: Backend, call: Call, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a kernel of ``backend``; if it raises, add its location in the model."""
    try:
        return kernel(*args)
    except HalError:
        raise
    except Exception as raised:
        raise CompareError(
            f"{call.operation} of the backend {backend.name} raised {raised!r:.300} in {call.path}, step {call.step}",
            "fix this kernel first",
        ) from raised


def results_of(returned: Any) -> dict[str, Tensor]:
    """Return the tensors that an operation returned, by name."""
    leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    if len(leaves) == 1:
        return {"result": leaves[0]}
    return {f"result {index}": leaf for index, leaf in enumerate(leaves)}


def worst_error(
    operation: Operation, dtype: torch.dtype, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Error:
    """Return the worst error of a call's results. NaN is right where the reference gives it.

    Args:
        operation: sets the tolerance. Its absolute part assumes results of unit size; it grows with a row's RMS if that
            exceeds 1.
        dtype: dtype that the model computes in.
        found: results on any device.
        expected: results with the same names.
    """
    if found.keys() != expected.keys():
        return Error(math.inf, problem=f"it gave {', '.join(found) or 'nothing'} and not {', '.join(expected)}")
    errors = []
    for name, want in expected.items():
        size = rms(want.cpu()).unsqueeze(-1).clamp(min=1.0) if want.is_floating_point() and want.dim() else 1.0
        errors.append(error(operation, dtype, found[name], want, result=name, size=size, equal_nan=True))
    return max(errors, key=lambda each: each.ratio, default=Error(0.0))
