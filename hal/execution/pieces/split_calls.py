"""Calls of splitting operations in a step, and the declared axes along which their tensors are cut to the step.

Graphs compute with all rows of their bucket. The operations between them run on the tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from hal import ops
from hal.errors import CompileError
from hal.ops.declaration.axes import BLOCKS, LEADING, ROWS, SEQUENCES, STEP_AXES, TOKENS, Shape
from hal.ops.declaration.constraints import format_shape
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel

Cut = tuple[tuple[int, str], ...]
"""Dimensions of a tensor that are cut to the step, with their axes."""


@attrs.frozen
class Kind:
    """The properties of a tensor that do not depend on the step: dtype, and shape with varying axes by name."""

    dtype: Any
    shape: tuple[int | str, ...]

    @classmethod
    def of(cls, declared: Shape, tensor: Tensor) -> Kind:
        """Return the kind of a tensor with a declared shape."""
        leading = tensor.dim() - len(declared.axes)
        sizes: list[int | str] = [LEADING] * leading
        for axis, size in zip(declared.axes, tensor.shape[leading:], strict=True):
            names = {axis.name, *(name for each in axis.sizes for name in each.names)}
            sizes.append(axis.text if names & {*STEP_AXES} else size)
        return cls(tensor.dtype, tuple(sizes))


@attrs.frozen
class SplitCall:
    """A call of a splitting operation, with the tokens of its bucket.

    Attributes:
        operation: the called operation.
        fields: arguments that are batch fields and differ between steps, with the names of the fields.
        computed: tensors that the step computes for the call, by argument.
        fixed: all other arguments.
        cuts: how the tensors in ``computed`` are cut to a step.
    """

    operation: Operation
    fields: Mapping[str, str]
    computed: Mapping[str, Tensor]
    fixed: Mapping[str, Any]
    cuts: Mapping[str, Cut]

    @classmethod
    def read(
        cls,
        operation: Operation,
        arguments: Mapping[str, Any],
        *,
        fields: Mapping[int, str],
        kept: Collection[int],
        sizes: Mapping[str, int],
    ) -> SplitCall:
        """Classify a call's arguments.

        Args:
            operation: the called operation.
            arguments: of the call, by name.
            fields: batch fields that differ between steps, by the ids of their tensors.
            kept: ids of tensors with permanent addresses: weights and states.
            sizes: the bucket's sizes, by axis.

        Raises:
            CompileError: the declaration does not say how a tensor is cut to a step, or the tensor does not match it.
        """
        given = {name: fields[id(each)] for name, each in arguments.items() if id(each) in fields}
        computed = {
            name: each
            for name, each in arguments.items()
            if isinstance(each, Tensor) and id(each) not in kept and name not in given
        }
        fixed = {name: each for name, each in arguments.items() if name not in given and name not in computed}
        call = cls(operation, given, computed, fixed, {})
        shapes = dict(operation.constraints.shapes)
        return attrs.evolve(
            call, cuts={name: call._cut(name, shapes[name], each, sizes) for name, each in computed.items()}
        )

    @property
    def cut_to_step(self) -> bool:
        """Whether it runs on the step's rows. Others run on all rows of the bucket, since rows are independent."""
        return bool(self.fields) or self.operation.rowwise not in (TOKENS, ROWS, LEADING)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of the tensors in ``computed``."""
        shapes = dict(self.operation.constraints.shapes)
        return {name: Kind.of(shapes[name], each) for name, each in self.computed.items()}

    def result_kinds(self, results: list[Tensor]) -> list[Kind]:
        """Return the kinds of the results."""
        return [Kind.of(shape, each) for shape, each in zip(self.operation.constraints.results, results, strict=True)]

    def result_cuts(self, results: list[Tensor], sizes: Mapping[str, int]) -> list[Cut]:
        """Return how the results are cut to a step.

        Raises:
            CompileError: as :meth:`read`.
        """
        return [
            self._cut(f"result {place}", shape, each, sizes)
            for place, (shape, each) in enumerate(zip(self.operation.constraints.results, results, strict=True))
        ]

    def _cut(self, name: str, declared: Shape, tensor: Tensor, sizes: Mapping[str, int]) -> Cut:
        shape, operation = tuple(tensor.shape), self.operation.name
        if not self.cut_to_step:
            return ()
        what = f"{operation} runs on the tokens of a step, and declares {name}, {format_shape(shape)}, as "
        remedy = f'let {operation} declare its axis "{TOKENS}"; or use the compiler "piecewise" or "eager"'
        first, found = len(shape) - len(declared.axes), []
        if first:
            raise CompileError(f"{what}`{declared.text}`, which does not say if they have a row per token", remedy)
        for dim, axis in enumerate(declared.axes):
            names = {axis.name, *(each for size in axis.sizes for each in size.names)}
            if axis.name == TOKENS and not axis.sizes:
                if shape[dim] != sizes[axis.name]:
                    raise CompileError(
                        f"{operation} is called with {name} {format_shape(shape)}, declared `{declared.text}`, in a "
                        f"step of {sizes[axis.name]} {axis.name}",
                        f'give it one row per element of {axis.name}, or use the compiler "piecewise" or "eager"',
                    )
                found.append((dim, axis.name))
            elif names & {TOKENS, ROWS, SEQUENCES, BLOCKS}:
                raise CompileError(f"{what}`{declared.text}`, but no graph can know {axis.text}", remedy)
        return tuple(found)


def cut_to(tensor: Tensor, cut: Cut, sizes: Mapping[str, int]) -> Tensor:
    """Return the part of a bucket's tensor that belongs to a step of these sizes."""
    for dim, axis in cut:
        tensor = tensor.narrow(dim, 0, sizes[axis])
    return tensor


@attrs.frozen
class RecordedCall:
    """A call, as recorded in an eager step.

    Attributes:
        operation: its name.
        kinds: the kinds of the tensors that the step computes for it.
        results: the kinds of the results, with their numbers of elements.
        places: the memory of each result; results with disjoint lifetimes can have the same number.
    """

    operation: str
    kinds: Mapping[str, Kind]
    results: tuple[tuple[Kind, int], ...]
    places: tuple[int, ...]


def record_calls(
    run: Callable[[], Any], at: Collection[str], read: Callable[[Operation, Mapping[str, Any]], SplitCall]
) -> list[RecordedCall]:
    """Run a step once, eagerly, and return the calls of the operations ``at``, with the lifetimes of their results.

    Raises:
        CompileError: see :meth:`SplitCall.read`.
    """
    calls: list[RecordedCall] = []
    alive: list[StorageWeakRef] = []

    def wrap(operation: Operation, kernel: Kernel) -> Kernel:
        def noted(*args: Any, **kwargs: Any) -> Any:
            call = read(operation, operation.arguments(args, kwargs))
            found = kernel(*args, **kwargs)
            results = tensors_of(found)
            places: list[int] = []
            for result in results:
                # Pieces before this one were the last readers of an expired result.
                free = (place for place, each in enumerate(alive) if each.expired() and place not in places)
                place = next(free, len(alive))
                alive[place : place + 1] = [StorageWeakRef(result.untyped_storage())]
                places.append(place)
            kinds = zip(call.result_kinds(results), [each.numel() for each in results], strict=True)
            calls.append(RecordedCall(operation.name, call.kinds, tuple(kinds), tuple(places)))
            return found

        return noted if operation.name in at else kernel

    with ops.intercepted(wrap):
        run()
    return calls


def tensors_of(found: Any) -> list[Tensor]:
    """Return the tensors of a result, in order."""
    return [each for each in tree_iter(found) if isinstance(each, Tensor)]
