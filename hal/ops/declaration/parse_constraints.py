"""Parsing of the axes and dtypes that an operation or a rewrite declares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch

from hal.errors import OperationError, nearest
from hal.ops.declaration.axes import LEADING, parse_shape
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.dtypes import parse_dtypes

RESULT = "return"
"""The key of the results in a declaration. Its value is one entry, or a tuple of one per result."""


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
    """Parse the axes and dtypes of a declaration.

    Args:
        what: the name of the declaration, for errors.
        arguments: the names of all arguments.
        tensors: the names of arguments that are known to be tensors, or None.
        others: the types of arguments that are known not to be tensors, by name.
        results: the number of results; None if results need not be declared.
        axes: strings in the syntax of :mod:`hal.ops.declaration.axes`, by argument, and under ``return`` for the
            results.
        dtypes: dtypes in the syntax of :mod:`hal.ops.declaration.dtypes`, by the same keys.

    Raises:
        OperationError: a tensor is missing, a name is not that of a tensor, or an entry is malformed.
    """
    axes = _checked(what, "axes", axes, arguments, tensors, others, results)
    dtypes = _checked(what, "dtypes", dtypes, arguments, tensors, others, results)
    kinds = {name: others.get(name, torch.dtype) for name in arguments}
    sources = [name for name, kind in kinds.items() if torch.dtype in (kind, *get_args(kind))]
    named = [name for name in arguments if name in axes]
    if unlike := [name for name in arguments if (name in axes) != (name in dtypes)]:
        raise OperationError(
            f"{what} declares only one of axes and dtypes for its argument {unlike[0]!r}", "declare both, or neither"
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
            f"{what} declares axes of {len(found.results)} results but dtypes of {len(found.result_dtypes)}",
            "declare both as a tuple with one entry per result",
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
    """Return the entries after checking that they are those of the tensors."""
    example = '{"x": "tokens width"}' if kind == "axes" else '{"x": FLOATING}'
    needed = [name for name in arguments if name in tensors] + ([RESULT] if results else [])
    if not isinstance(given, Mapping):
        raise OperationError(
            f"{what} declares no {kind}" if given is None else f"{what} declares {kind}={given!r}",
            f"declare those of {', '.join(needed) or 'its tensors'}, by name: {kind}={example}",
        )
    for name in given:
        if name in others or (name == RESULT and results == 0):
            reason = "it returns nothing" if name == RESULT else f"{name} is not a tensor"
            raise OperationError(f"{what} declares {kind} of {name!r}, but {reason}", f"remove {name!r} from {kind}")
        if name not in arguments and name != RESULT:
            raise OperationError(
                f"{what} declares {kind} of {name!r}, which is not an argument", nearest(str(name), arguments)
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
            f"{what} declares {kind} of {len(several)} results but returns {results}",
            f"declare a tuple with one entry per result: {kind}={{'return': (...)}}",
        )
    return several


def _check_names(what: str, found: Constraints) -> None:
    """Raise OperationError if a size is computed from an unknown name."""
    inputs = {name for _, shape in found.shapes for name in shape.names}
    both = inputs | {name for shape in found.results for name in shape.names}
    numbers = set(found.arguments) - {name for name, _ in found.shapes}
    for shapes, known in (([shape for _, shape in found.shapes], inputs), (found.results, both)):
        for shape in shapes:
            used = [name for axis in shape.axes for size in axis.sizes for name in size.names]
            if unknown := [name for name in used if name not in known | numbers]:
                raise OperationError(
                    f"{what} declares the axes {shape.text!r}, but no tensor has an axis {unknown[0]!r}",
                    nearest(unknown[0], (known | numbers) - {LEADING}),
                )
