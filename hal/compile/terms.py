"""What a rewrite's samples say of it: that both sides give the same, and what a place must be like to be a sample.

A pattern is found wherever its calls are, even with arguments that no kernel was made for: a residual that broadcasts,
a scale of another dtype. So what all samples have in common is demanded of a match, too: the number of an argument's
dimensions, sizes that are always 1, sizes and dtypes that are always those of another argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.normalise import same_shape, same_size
from hal.compile.pattern import names_of
from hal.errors import CompileError
from hal.ops.samples import Draw, Sample

DRAWN = (torch.float32, torch.bfloat16)


@attrs.frozen
class Terms:
    """What all samples have in common. Arguments are meant by their index, dimensions from the last, as -1.

    Attributes:
        names: of all arguments.
        ranks: numbers of dimensions, where it is always the same.
        least: the smallest number of dimensions, where it is not.
        dtypes: those that were met, for arguments whose dtype does not follow the draw's.
        following: arguments that have the draw's dtype.
        same_shapes: pairs of arguments.
        same_sizes: pairs of dimensions, each an argument and its dimension; only of those that differ between samples.
        single: dimensions whose size is always 1.
    """

    names: tuple[str, ...]
    ranks: dict[int, int]
    least: dict[int, int]
    dtypes: dict[int, frozenset[torch.dtype]]
    following: tuple[int, ...]
    same_shapes: tuple[tuple[int, int], ...]
    same_sizes: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    single: tuple[tuple[int, int], ...]

    def unlike(self, arguments: Sequence[Any]) -> str | None:
        """Why arguments, tensors being fake ones, are not like the samples; None if they are."""
        return self._unlike_dtype(arguments) or self._unlike_shape(arguments)

    def _unlike_dtype(self, arguments: Sequence[Any]) -> str | None:
        for index, allowed in self.dtypes.items():
            if arguments[index].dtype not in allowed:
                return f"{self._of(arguments, index)}, and {_dtypes(allowed)} in all samples"
        for index in self.following:
            if not arguments[index].dtype.is_floating_point:
                return f"{self._of(arguments, index)}, which is not floating"
            if arguments[index].dtype != arguments[self.following[0]].dtype:
                first = self._of(arguments, self.following[0])
                return f"{first} and {self._of(arguments, index)}, and alike in all samples"
        return None

    def _unlike_shape(self, arguments: Sequence[Any]) -> str | None:
        shapes = {index: each.shape for index, each in enumerate(arguments) if isinstance(each, Tensor)}
        for index, rank in self.ranks.items():
            if len(shapes[index]) != rank:
                return f"{self.names[index]} has {len(shapes[index])} dimensions, and {rank} in all samples"
        for one, other in self.same_shapes:
            if not same_shape(shapes[one], shapes[other]):
                return (
                    f"{self.names[one]} is {_sizes(shapes[one])} and {self.names[other]} {_sizes(shapes[other])}, "
                    "and alike in all samples"
                )
        for index, rank in self.least.items():
            if len(shapes[index]) < rank:
                return f"{self.names[index]} has {len(shapes[index])} dimensions, and {rank} or more in all samples"
        for index, dim in self.single:
            if not same_size(shapes[index][dim], 1):
                return f"{self.names[index]} is {_sizes(shapes[index])}, and has size 1 at {dim} in all samples"
        for (one, first), (other, second) in self.same_sizes:
            if not same_size(shapes[one][first], shapes[other][second]):
                return (
                    f"{self.names[one]} is {_sizes(shapes[one])} and {self.names[other]} {_sizes(shapes[other])}, "
                    f"and sizes {first} and {second} are alike in all samples"
                )
        return None

    def _of(self, arguments: Sequence[Any], index: int) -> str:
        return f"{self.names[index]} is {_dtypes([arguments[index].dtype])}"


Drawn = Sequence[tuple[torch.dtype, Sample]]
"""Samples, each with the dtype of the draw that it came from."""


def forms_of(samples: Callable[[Draw], Iterable[Sample]]) -> list[Drawn]:
    """The samples, sorted into those that have tensors, None, and flags of the same values in the same places.

    Raises:
        CompileError: there are none.
    """
    forms: dict[Any, list[tuple[torch.dtype, Sample]]] = {}
    for dtype in DRAWN:
        for sample in samples(Draw(dtype)):
            forms.setdefault(tuple(map(_form, sample)), []).append((dtype, tuple(sample)))
    if not forms:
        raise CompileError("there are no samples", "yield at least one tuple of arguments")
    return list(forms.values())


def _form(given: Any) -> Any:
    return Tensor if isinstance(given, Tensor) else given if isinstance(given, bool) else type(given)


def terms_of(pattern: Callable[..., Any], drawn: Drawn) -> Terms:
    """What the samples of one form have in common."""
    all_samples = [each for _, each in drawn]
    tensors = [index for index, each in enumerate(all_samples[0]) if isinstance(each, Tensor)]
    following = [index for index in tensors if all(each[index].dtype == dtype for dtype, each in drawn)]
    ranks = {index: {each[index].dim() for each in all_samples} for index in tensors}
    dims = {
        (index, -back): [int(each[index].shape[-back]) for each in all_samples]
        for index in tensors
        for back in range(1, min(ranks[index]) + 1)
    }
    shapes = {index: [tuple(each[index].shape) for each in all_samples] for index in tensors}
    alike = [(one, other) for one, other in combinations(tensors, 2) if shapes[one] == shapes[other]]
    by_sizes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for place, sizes in dims.items():
        by_sizes.setdefault(tuple(sizes), []).append(place)
    return Terms(
        names=names_of(pattern, len(all_samples[0])),
        ranks={index: min(found) for index, found in ranks.items() if len(found) == 1},
        least={index: min(found) for index, found in ranks.items() if len(found) > 1},
        dtypes={
            index: frozenset(each[index].dtype for each in all_samples) for index in tensors if index not in following
        },
        following=tuple(following),
        same_shapes=tuple(alike),
        same_sizes=tuple(
            (places[0], other) for sizes, places in by_sizes.items() if len(set(sizes)) > 1 for other in places[1:]
        ),
        single=tuple(place for place, sizes in dims.items() if set(sizes) == {1}),
    )


def check_sides(
    pattern: Callable[..., Any], replacement: Callable[..., Any], samples: Callable[[Draw], Iterable[Sample]]
) -> None:
    """Demand that both sides give tensors of the same shapes and dtypes on every sample, by fake tensors.

    Raises:
        CompileError: they do not; says what each gives.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for dtype in DRAWN:
        for sample in samples(Draw(dtype)):
            fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in sample]
            with torch.inference_mode(False), torch.no_grad(), mode:
                given = [as_list(side(*fakes)) for side in (replacement, pattern)]
            demand_alike(*given)


def as_list(given: Any) -> list[Any]:
    """What a function gave, as a list of tensors."""
    return [] if given is None else list(given) if isinstance(given, (tuple, list)) else [given]


def demand_alike(given: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise CompileError unless a replacement gives what its pattern gives, in number, shapes and dtypes."""
    alike = len(given) == len(expected) and all(
        isinstance(one, Tensor) and one.dtype == other.dtype and same_shape(one.shape, other.shape)
        for one, other in zip(given, expected, strict=False)
    )
    if not alike:
        raise CompileError(
            f"its replacement gives {_tensors(given)}, and its pattern {_tensors(expected)}",
            "make both give tensors of the same shapes and dtypes, in the same order",
        )


def _tensors(values: Sequence[Any]) -> str:
    said = [
        f"{_dtypes([each.dtype])} {_sizes(each.shape)}" if isinstance(each, Tensor) else repr(each) for each in values
    ]
    return ", ".join(said) or "nothing"


def _dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))


def _sizes(shape: Iterable[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"
