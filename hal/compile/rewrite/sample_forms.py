"""The forms of a rewrite's samples, by optional arguments and flags, and what both its sides give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.compile.fx.normalise import same_shape
from hal.errors import CompileError
from hal.ops.declaration.constraints import sizes_shown
from hal.ops.declaration.dtypes import shown
from hal.ops.declaration.samples import Draw, Sample

DRAWN = (torch.float32, torch.bfloat16)


def forms_of(samples: Callable[[Draw], Iterable[Sample]]) -> list[list[Sample]]:
    """The samples, sorted into those that have tensors, None, and flags of the same values in the same places.

    Raises:
        CompileError: there are none.
    """
    forms: dict[Any, list[Sample]] = {}
    for dtype in DRAWN:
        for sample in samples(Draw(dtype)):
            forms.setdefault(tuple(map(_form, sample)), []).append(tuple(sample))
    if not forms:
        raise CompileError("there are no samples", "yield at least one tuple of arguments")
    return list(forms.values())


def _form(given: Any) -> Any:
    return Tensor if isinstance(given, Tensor) else given if isinstance(given, bool) else type(given)


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
        f"{shown([each.dtype])} {sizes_shown(each.shape)}" if isinstance(each, Tensor) else repr(each)
        for each in values
    ]
    return ", ".join(said) or "nothing"
