"""What a model does between the splitting operations that it calls: found out by running it eagerly for two sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter

from hal import ops
from hal.errors import CompileError, ConfigError
from hal.ops.binding import Kernel
from hal.ops.declaration import Operation


@attrs.frozen
class Kind:
    """A tensor that a marker reads or gives. Its shape is without the first dimension if that goes by tokens."""

    by_token: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    def at(self, tokens: int) -> tuple[int, ...]:
        """Its shape for so many tokens."""
        return (tokens, *self.shape) if self.by_token else self.shape


@attrs.frozen
class Marker:
    """What is known of a call from running the model eagerly.

    Attributes:
        operation: its name.
        arguments: the tensors that the model computed for it, by name.
        results: of it, in order.
        several: whether it gives a tuple.
        places: where the results lie: those that are not needed at once may have the same number.
    """

    operation: str
    arguments: dict[str, Kind]
    results: tuple[Kind, ...]
    several: bool
    places: tuple[int, ...]


@attrs.frozen
class Eagerly:
    """A model's step, to run eagerly for any number of tokens.

    Attributes:
        name: the model's.
        run: the step, for so many tokens.
        given: by number of tokens, the ids of the tensors that the step takes and computes nothing of: weights, caches,
            and fields of the batch.
        at: names of the splitting operations.
    """

    name: str
    run: Callable[[int], Any]
    given: Callable[[int], Collection[int]]
    at: Collection[str]

    def markers(self, most: int) -> list[Marker]:
        """The splitting operations that the step calls, in order, and which of their tensors go by tokens.

        Raises:
            ConfigError: it does not call all of them.
            CompileError: it does not do the same for ``most`` tokens and for one less.
        """
        small = max(1, most - 1)
        first, second = self._noted(most), self._noted(small)
        called = {each.operation for each in first}
        if missing := sorted(set(self.at) - called):
            others = f"; of those it calls {', '.join(sorted(called))}" if called else ""
            raise ConfigError(
                f"splitting_ops has {', '.join(missing)}, which the model does not call{others}", "leave it out"
            )
        if [each.operation for each in first] != [each.operation for each in second]:
            raise CompileError(
                f"{self.name} calls other operations for {most} tokens than for {small}",
                'let it call the same ones for all sizes, or use the compiler "eager"',
            )
        return [
            attrs.evolve(
                one,
                arguments={
                    name: _by_both(one.operation, kind, other.arguments[name], most, small)
                    for name, kind in one.arguments.items()
                },
                results=tuple(
                    _by_both(one.operation, *kinds, most, small)
                    for kinds in zip(one.results, other.results, strict=True)
                ),
            )
            for one, other in zip(first, second, strict=True)
        ]

    def _noted(self, size: int) -> list[Marker]:
        markers: list[Marker] = []
        alive: list[StorageWeakRef] = []
        given = self.given(size)

        def wrap(operation: Operation, kernel: Kernel) -> Kernel:
            if operation.name not in self.at:
                return kernel

            def noted(*args: Any, **kwargs: Any) -> Any:
                arguments = operation.arguments(args, kwargs)
                computed = {
                    name: kind_of(each) for name, each in arguments.items()
                    if isinstance(each, Tensor) and id(each) not in given
                }  # fmt: skip
                found = kernel(*args, **kwargs)
                results = tensors_of(found)
                places: list[int] = []
                for result in results:
                    # What is gone by now was read by pieces before this one.
                    free = (place for place, each in enumerate(alive) if each.expired() and place not in places)
                    place = next(free, len(alive))
                    alive[place : place + 1] = [StorageWeakRef(result.untyped_storage())]
                    places.append(place)
                several, kinds = isinstance(found, tuple), tuple(map(kind_of, results))
                markers.append(Marker(operation.name, computed, kinds, several, tuple(places)))
                return found

            return noted

        with ops.intercepted(wrap):
            self.run(size)
        return markers


def _by_both(name: str, one: Kind, other: Kind, most: int, small: int) -> Kind:
    """What a tensor is, by its shapes for two numbers of tokens."""
    if one.shape == other.shape:
        return one
    if (one.shape[0], other.shape[0]) == (most, small) and one.shape[1:] == other.shape[1:]:
        return Kind(True, one.shape[1:], one.dtype)
    raise CompileError(
        f"{name} has a tensor of {list(one.shape)} for {most} tokens, and of {list(other.shape)} for {small}",
        'let the first dimension go by tokens, or use the compiler "piecewise"',
    )


def kind_of(tensor: Tensor) -> Kind:
    """A tensor's, until another number of tokens says which dimension goes by them."""
    return Kind(False, tuple(tensor.shape), tensor.dtype)


def tensors_of(found: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return [each for each in tree_iter(found) if isinstance(each, Tensor)]
