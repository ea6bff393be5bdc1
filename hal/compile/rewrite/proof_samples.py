"""Samples of a rewrite: their forms, the results of both sides, and arguments that violate one constraint each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.fx.normalize import same_shape
from hal.errors import CompileError
from hal.ops.declaration.axes import LEADING, Axis
from hal.ops.declaration.constraints import Constraints, Draw, Sample, format_shape
from hal.ops.declaration.dtypes import FLOATING, Dtypes, format_dtypes

DRAWN = (torch.float32, torch.bfloat16)
OTHERS = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8)
"""The dtypes that replace a declared one in violations."""


def forms_of(samples: Callable[[Draw], Iterable[Sample]], *, by_dtype: bool = False) -> list[list[Sample]]:
    """Group the samples by the positions of tensors and None, and by the values of flags.

    Args:
        samples: the samples of a rewrite.
        by_dtype: whether to group them by the dtypes of tensors too: casts depend on them.

    Raises:
        CompileError: the rewrite has no samples.
    """
    forms: dict[Any, list[Sample]] = {}
    for dtype in DRAWN:
        for sample in samples(Draw(dtype)):
            forms.setdefault(tuple(_form(each, by_dtype) for each in sample), []).append(tuple(sample))
    if not forms:
        raise CompileError("it has no samples", "yield at least one tuple of arguments")
    return list(forms.values())


def _form(given: Any, by_dtype: bool) -> Any:
    if by_dtype and isinstance(given, Tensor):
        return given.dtype
    return Tensor if isinstance(given, Tensor) else given if isinstance(given, bool) else type(given)


def check_sides(
    pattern: Callable[..., Any], replacement: Callable[..., Any], samples: Callable[[Draw], Iterable[Sample]]
) -> None:
    """Check on fake tensors that both sides return the same shapes and dtypes for every sample.

    Raises:
        CompileError: they differ. The error names the results of each.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for dtype in DRAWN:
        for sample in samples(Draw(dtype)):
            fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in sample]
            with torch.inference_mode(False), torch.no_grad(), mode:
                given = [as_list(side(*fakes)) for side in (replacement, pattern)]
            check_same_results(*given)


def as_list(given: Any) -> list[Any]:
    """Return a function's result as a list of tensors."""
    return [] if given is None else list(given) if isinstance(given, (tuple, list)) else [given]


def check_same_results(given: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise CompileError unless a replacement returns as many tensors as its pattern, of the same shapes and dtypes."""
    alike = len(given) == len(expected) and all(
        isinstance(one, Tensor) and one.dtype == other.dtype and same_shape(one.shape, other.shape)
        for one, other in zip(given, expected, strict=False)
    )
    if not alike:
        raise CompileError(
            f"its replacement returns {_tensors(given)}, and its pattern {_tensors(expected)}",
            "make both return tensors of the same shapes and dtypes, in the same order",
        )


def _tensors(values: Sequence[Any]) -> str:
    formatted = [
        f"{format_dtypes([each.dtype])} {format_shape(each.shape)}" if isinstance(each, Tensor) else repr(each)
        for each in values
    ]
    return ", ".join(formatted) or "nothing"


def violations(constraints: Constraints, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Yield samples in which one tensor has another rank, size or dtype. A rewrite must not be applied to any of them.

    Args:
        constraints: the declared constraints, each of which is violated.
        sample: arguments that meet them.

    Yields:
        A description of the violation, and the arguments.
    """
    places = {name: place for place, name in enumerate(constraints.arguments)}
    given = {name: sample[place] for name, place in places.items() if place < len(sample)}
    uses = _uses(constraints, given)
    for name, shape in constraints.shapes:
        tensor = given.get(name)
        if not isinstance(tensor, Tensor):
            continue

        def changed(what: str, value: Tensor, place: int = places[name], name: str = name) -> tuple[str, Sample]:
            return f"{name} {what}", (*sample[:place], value, *sample[place + 1 :])

        own = tensor.dim() - len(shape.axes)
        if shape.leading is None or uses[LEADING] > 1:
            yield changed("with a dimension more", tensor.unsqueeze(0))
        if shape.leading is None and tensor.dim() and tensor.shape[0]:
            yield changed("with a dimension less", tensor[0])
        if shape.leading == 1 and tensor.numel():
            yield changed(f"without {LEADING}", tensor[(0,) * own])
        if shape.leading is not None and uses[LEADING] > 1:
            for dim in range(own):
                yield from (changed(f"of size {value.shape[dim]} at {dim}", value) for value in _resized(tensor, dim))
        for dim, axis in enumerate(shape.axes, own):
            shared = axis.name is not None and uses[axis.name] > 1
            for value in _resized(tensor, dim) if shared or axis.sizes else ():
                if shared or value.shape[dim] not in _sizes(axis, constraints.sizes(sample)):
                    yield changed(f"of size {value.shape[dim]} at {dim}", value)
        for other in _other_dtype(constraints, given, name):
            yield changed(f"of {other}", tensor.to(other))


def _uses(constraints: Constraints, given: dict[str, Any]) -> Counter[str | None]:
    """Return how often each name occurs in the declarations of the given tensors, or as a given number."""
    found: Counter[str | None] = Counter(name for name, value in given.items() if type(value) is int)
    for name, shape in constraints.shapes:
        if isinstance(given.get(name), Tensor):
            found.update(shape.names)
    return found


def _resized(tensor: Tensor, dim: int) -> Iterator[Tensor]:
    """Yield the tensor with one element more, and with a single one, which broadcasts."""
    if tensor.shape[dim]:
        yield torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
    if tensor.shape[dim] > 1:
        yield tensor.narrow(dim, 0, 1)


def _sizes(axis: Axis, known: dict[str, Any]) -> list[Any]:
    """Return the allowed sizes of an axis that shares no name."""
    return [each.value(known) for each in axis.sizes if known.keys() >= set(each.names)]


def _other_dtype(constraints: Constraints, given: dict[str, Any], name: str) -> Iterator[torch.dtype]:
    """Yield a dtype that is not declared."""
    declared = dict(constraints.dtypes)
    allowed: Dtypes = declared[name]
    bound = [other for other in declared if other != name and isinstance(given.get(other), Tensor)]
    alone = allowed == (FLOATING,) and not any(
        FLOATING in declared[other] or (name in declared[other] and given[other].dtype not in declared[other])
        for other in bound
    )
    taken = {given[name].dtype, *(each for each in allowed if isinstance(each, torch.dtype))}
    for each in allowed:
        if isinstance(each, str) and isinstance(given.get(each), Tensor):
            taken.add(given[each].dtype)
    if len(allowed) > 1 and any(not isinstance(each, torch.dtype) for each in allowed):
        taken.update(each for each in OTHERS if each.is_floating_point)
    yield next(each for each in OTHERS if each not in taken and not (alone and each.is_floating_point))
