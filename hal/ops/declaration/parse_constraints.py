"""Reading the axes and dtypes that an operation or a rewrite declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hal.errors import OperationError, nearest
from hal.ops.declaration.axes import LEADING, parse_shape
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.dtypes import parse_dtypes

RESULT = "return"
"""The key of the results in a declaration: one entry, or a tuple with one for each."""


def constraints_of(
    what: str,
    *,
    arguments: Sequence[str],
    tensors: Collection[str],
    others: Mapping[str, Any],
    results: int | None,
    axes: Mapping[str, Any] | None,
    dtypes: Mapping[str, Any] | None,
) -> Constraints:
    """Read a declaration's axes and dtypes.

    Args:
        what: declares them, for the error.
        arguments: names of all arguments.
        tensors: names of those that are tensors, or None, for certain.
        others: by name, the types of those that are no tensors for certain.
        results: how many there are; None if results need not be declared.
        axes: by argument, and for the results by ``return``, a string as :mod:`hal.ops.declaration.axes` says.
        dtypes: likewise, what :mod:`hal.ops.declaration.dtypes` says.

    Raises:
        OperationError: a tensor is left out; a name is no tensor's; or an entry is not spelled as those modules say.
    """
    axes = _checked(what, "axes", axes, arguments, tensors, others, results)
    dtypes = _checked(what, "dtypes", dtypes, arguments, tensors, others, results)
    sources = [name for name in arguments if others.get(name, torch.dtype) is torch.dtype]
    named = [name for name in arguments if name in axes]
    if unlike := [name for name in arguments if (name in axes) != (name in dtypes)]:
        raise OperationError(
            f"{what} declares axes or dtypes of its argument {unlike[0]!r}, and not both", "declare both, or neither"
        )
    found = Constraints(
        arguments=tuple(arguments),
        shapes=tuple((name, parse_shape(axes[name], f"{what}: {name}")) for name in named),
        dtypes=tuple(
            (name, parse_dtypes(dtypes[name], f"{what}: {name}", [each for each in sources if each != name]))
            for name in named
        ),
        results=tuple(
            parse_shape(each, f"{what}: result {place}")
            for place, each in enumerate(_of_results(what, "axes", axes, results))
        ),
        result_dtypes=tuple(
            parse_dtypes(each, f"{what}: result {place}", sources)
            for place, each in enumerate(_of_results(what, "dtypes", dtypes, results))
        ),
    )
    if len(found.results) != len(found.result_dtypes):
        raise OperationError(
            f"{what} declares axes of {len(found.results)} results and dtypes of {len(found.result_dtypes)}",
            "give both a tuple with one entry for each result",
        )
    _check_names(what, found)
    return found


def _checked(
    what: str,
    kind: str,
    given: Mapping[str, Any] | None,
    arguments: Sequence[str],
    tensors: Collection[str],
    others: Collection[str],
    results: int | None,
) -> Mapping[str, Any]:
    """The entries, which are of the tensors and of nothing else."""
    example = '{"x": "tokens width"}' if kind == "axes" else '{"x": FLOATING}'
    needed = [name for name in arguments if name in tensors] + ([RESULT] if results else [])
    if not isinstance(given, Mapping):
        raise OperationError(
            f"{what} declares no {kind}" if given is None else f"{what} declares {kind}={given!r}",
            f"declare those of {', '.join(needed) or 'its tensors'}, by name: {kind}={example}",
        )
    for name in given:
        if name in others or (name == RESULT and results == 0):
            said = "it returns nothing" if name == RESULT else f"{name} is no tensor"
            raise OperationError(f"{what} declares {kind} of {name!r}, and {said}", "leave it out")
        if name not in arguments and name != RESULT:
            raise OperationError(
                f"{what} declares {kind} of {name!r}, which it does not take", nearest(str(name), arguments)
            )
    if missing := [name for name in needed if name not in given]:
        raise OperationError(
            f"{what} does not declare the {kind} of {', '.join(missing)}",
            f"add {'an entry' if len(missing) == 1 else 'entries'} such as {example} to {kind}",
        )
    return given


def _of_results(what: str, kind: str, given: Mapping[str, Any], results: int | None) -> tuple[Any, ...]:
    if RESULT not in given:
        return ()
    several = given[RESULT] if isinstance(given[RESULT], tuple) else (given[RESULT],)
    if results is not None and len(several) != results:
        raise OperationError(
            f"{what} declares {kind} of {len(several)} results and returns {results}",
            f"give a tuple with one entry for each: {kind}={{'return': (...)}}",
        )
    return several


def _check_names(what: str, found: Constraints) -> None:
    """What a size is computed from is a size that is known."""
    inputs = {name for _, shape in found.shapes for name in shape.names}
    both = inputs | {name for shape in found.results for name in shape.names}
    numbers = set(found.arguments) - {name for name, _ in found.shapes}
    for shapes, known in (([shape for _, shape in found.shapes], inputs), (found.results, both)):
        for shape in shapes:
            used = [name for axis in shape.axes for size in axis.sizes for name in size.names]
            if unknown := [name for name in used if name not in known | numbers]:
                raise OperationError(
                    f"{what} declares the axes {shape.text!r}, and no tensor has an axis {unknown[0]!r}",
                    nearest(unknown[0], (known | numbers) - {LEADING}),
                )
