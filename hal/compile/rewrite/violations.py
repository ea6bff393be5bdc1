"""Arguments that break one constraint of a rewrite each, made of a sample: no rewrite may be applied to such."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hal.ops.declaration.axes import LEADING, Axis
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.dtypes import FLOATING, Dtypes
from hal.ops.declaration.samples import Sample

OTHERS = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8)
"""Dtypes to put in place of a declared one."""


def violations(constraints: Constraints, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Change one tensor at a time: its rank, one of its sizes, or its dtype.

    Args:
        constraints: of which each is broken, read from the declaration alone.
        sample: meets them.

    Yields:
        What is wrong, and the arguments.
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
    """How often each name stands in the declaration of tensors that are given, or is a number that is."""
    found: Counter[str | None] = Counter(name for name, value in given.items() if type(value) is int)
    for name, shape in constraints.shapes:
        if isinstance(given.get(name), Tensor):
            found.update(shape.names)
    return found


def _resized(tensor: Tensor, dim: int) -> Iterator[Tensor]:
    """One element more, and one alone, which broadcasts."""
    if tensor.shape[dim]:
        yield torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
    if tensor.shape[dim] > 1:
        yield tensor.narrow(dim, 0, 1)


def _sizes(axis: Axis, known: dict[str, Any]) -> list[Any]:
    """What an axis may be, where it is no size that anything else has."""
    return [each.value(known) for each in axis.sizes if known.keys() >= set(each.names)]


def _other_dtype(constraints: Constraints, given: dict[str, Any], name: str) -> Iterator[torch.dtype]:
    """A dtype that is none of those declared."""
    declared = dict(constraints.dtypes)
    allowed: Dtypes = declared[name]
    bound = [other for other in declared if other != name and isinstance(given.get(other), Tensor)]
    alone = allowed == (FLOATING,) and not any(
        FLOATING in declared[other] or name in declared[other] for other in bound
    )
    taken = {given[name].dtype, *(each for each in allowed if isinstance(each, torch.dtype))}
    for each in allowed:
        if isinstance(each, str) and isinstance(given.get(each), Tensor):
            taken.add(given[each].dtype)
    if len(allowed) > 1 and any(not isinstance(each, torch.dtype) for each in allowed):
        taken.update(each for each in OTHERS if each.is_floating_point)
    yield next(each for each in OTHERS if each not in taken and not (alone and each.is_floating_point))
