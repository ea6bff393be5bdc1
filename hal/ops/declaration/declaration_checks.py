"""Validation of declarations: their signature, arguments, tolerance and row axis."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import attrs
import torch
from torch import Tensor

from hal.errors import OperationError, nearest
from hal.ops.declaration.constraints import Constraints
from hal.ops.declaration.node_form import is_options
from hal.ops.declaration.parse_constraints import constraints_of

ARGUMENTS = (Tensor, int, float, bool, str, torch.dtype)
"""The types of arguments, each of which may be optional."""
TAKES = "Tensor, int, float, bool, str, torch.dtype, or one of them or None"
OPTIONS = (int, float, bool, str)
"""The types of the fields of options, each of which may be optional."""
RETURNS = "Tensor, a tuple of Tensors, or None"


def check_declaration(
    body: Callable[..., Any],
    *,
    mutates: Iterable[str],
    host: Iterable[str],
    state: Iterable[str],
    buffers: Iterable[str],
    weights: Iterable[str],
    tolerance: Mapping[Any, Any],
    off_by_one: Mapping[Any, Any],
    collective: bool,
) -> None:
    """Raise OperationError for a declaration that torch.library, compilers or tests would reject later, or ignore."""
    name, signature = body.__name__, inspect.signature(body)
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise OperationError(
                f"{name} takes {str(parameter).partition(':')[0]!r} as a {parameter.kind.description} argument",
                "declare arguments that calls can pass by position and by name, without `*` and `/`",
            )
    _check_annotations(name, body, signature)
    _check_options(name, get_type_hints(body), list(signature.parameters))
    listed = {"mutates": mutates, "host": host, "state": state, "buffers": buffers, "weights": weights}
    for what, arguments in listed.items():
        if isinstance(arguments, str):
            raise OperationError(
                f"{name} declares {what}={arguments!r}, a string instead of a collection of names",
                f"make it a tuple: {what}=({arguments!r},)",
            )
        for argument in arguments:
            if argument not in signature.parameters:
                raise OperationError(
                    f"{name} declares {argument!r} in {what}, but has no argument of that name",
                    nearest(argument, signature.parameters),
                )
    if collective and "group" not in signature.parameters:
        raise OperationError(
            f"{name} declares over_shards, but has no argument `group`", "name the group of ranks by `group: str`"
        )
    _check_written(name, mutates, state, buffers)
    for dtype, pair in tolerance.items():
        if not (_is_dtype(dtype) and isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_bound, pair))):
            raise OperationError(
                f"{name} declares the tolerance {dtype!r}: {pair!r}",
                "declare a relative and an absolute tolerance by torch.dtype: {torch.float32: (1e-5, 1e-5)}",
            )
    for dtype, share in off_by_one.items():
        if not (_is_dtype(dtype) and _is_bound(share) and share <= 1):
            raise OperationError(
                f"{name} declares off_by_one {dtype!r}: {share!r}",
                "declare a share from 0 to 1 by torch.dtype: {torch.bfloat16: 0.01}",
            )


def _check_written(name: str, mutates: Iterable[str], state: Iterable[str], buffers: Iterable[str]) -> None:
    for argument in mutates:
        if (argument in state) == (argument in buffers):
            raise OperationError(
                f"{name} mutates its argument {argument!r}, and declares it "
                + ("both as state and as a buffer" if argument in state else "neither as state nor as a buffer"),
                f"declare state=({argument!r},) if a model keeps it between steps, else buffers=({argument!r},)",
            )
    if unwritten := [argument for argument in buffers if argument not in mutates]:
        raise OperationError(
            f"{name} declares the buffer {unwritten[0]!r}, which it does not mutate",
            "remove it from buffers, or add it to mutates",
        )


STEP_ARGUMENTS: Mapping[str, tuple[str, torch.dtype]] = {
    "slot_mapping": ("tokens", torch.int32),
    "block_table": ("sequences blocks", torch.int32),
    "query_start_loc": ("sequences+1", torch.int32),
    "kv_lens": ("sequences", torch.int32),
    "read_slots": ("sequences", torch.int32),
    "write_slots": ("sequences saves", torch.int32),
}
"""The axes and the dtype of the arguments that a step's batch gives, which declarations may leave out."""
TWIN = "_host"
"""What follows the name of an argument in the name of its copy on the host."""


def with_step_arguments(
    arguments: Iterable[str], given: Mapping[str, Any] | None, index: int
) -> Mapping[str, Any] | None:
    """Return declared axes (``index`` 0) or dtypes (1), completed for step arguments and their copies on the host."""
    if not isinstance(given, Mapping):
        return given
    found = dict(given)
    for name in arguments:
        of = name.removesuffix(TWIN)
        if of in STEP_ARGUMENTS:
            found.setdefault(name, found.get(of, STEP_ARGUMENTS[of][index]))
    return found


def read_constraints(
    body: Callable[..., Any], axes: Mapping[str, Any] | None, dtypes: Mapping[str, Any] | None
) -> Constraints:
    """Parse the axes and dtypes of an operation, which must declare those of all its tensors.

    Raises:
        OperationError: a declaration is missing, or does not have the syntax of :mod:`~hal.ops.declaration.axes` or
            :mod:`~hal.ops.declaration.dtypes`.
    """
    kinds = get_type_hints(body)
    returned = kinds.pop("return")
    tensors = {name for name, kind in kinds.items() if kind is Tensor or Tensor in get_args(kind)}
    return constraints_of(
        body.__name__,
        arguments=list(inspect.signature(body).parameters),
        tensors=tensors,
        others={name: kind for name, kind in kinds.items() if name not in tensors},
        results=0 if returned is NoneType else len(get_args(returned)) or 1,
        axes=axes,
        dtypes=dtypes,
    )


NOT_DECLARED = "undeclared"
"""The default of ``rowwise``, which is an error, so that declarations are explicit."""


def check_rowwise(name: str, constraints: Constraints, rowwise: str | None) -> None:
    """Raise OperationError unless ``rowwise`` is None, or an axis of an argument and of every result."""
    if rowwise is None:
        return
    inputs = [shape for _, shape in constraints.shapes if rowwise in shape.names]
    known = sorted({each for _, shape in constraints.shapes for each in shape.names})
    if rowwise == NOT_DECLARED:
        raise OperationError(
            f"{name} does not declare rowwise, the axis over which it computes row by row",
            f"declare one of {', '.join(known)}: rowwise={(known or ['tokens'])[0]!r}, or rowwise=None",
        )
    if not inputs:
        raise OperationError(
            f"{name} declares rowwise={rowwise!r}, which is not an axis of an argument", nearest(rowwise, known)
        )
    if without := [place for place, shape in enumerate(constraints.results) if rowwise not in shape.names]:
        raise OperationError(
            f"{name} declares rowwise={rowwise!r}, which is not an axis of result {without[0]}",
            "add the axis to every result, or declare rowwise=None",
        )
    used = [
        axis.text
        for shape in (*(shape for _, shape in constraints.shapes), *constraints.results)
        for axis in shape.axes
        for size in axis.sizes
        if rowwise in size.names
    ]
    if used:
        raise OperationError(
            f"{name} declares rowwise={rowwise!r}, but computes the size {used[0]} from it",
            "declare rowwise=None: with fewer rows, that tensor would have another size",
        )


def _check_annotations(name: str, body: Callable[..., Any], signature: inspect.Signature) -> None:
    try:
        kinds = get_type_hints(body)
    except Exception as error:  # an annotation can be any expression
        raise OperationError(
            f"an annotation of {name} cannot be evaluated: {error}",
            "annotate with names that exist when the module is imported, not only under TYPE_CHECKING",
        ) from error
    for argument in signature.parameters:
        if argument not in kinds:
            raise OperationError(f"{name} does not annotate its argument {argument!r}", f"annotate it as {TAKES}")
        if not is_options(kinds[argument]) and not _is_taken(kinds[argument]):
            raise OperationError(
                f"{name} annotates its argument {argument!r} as {_shown(kinds[argument])}", f"annotate it as {TAKES}"
            )
    if "return" not in kinds:
        raise OperationError(f"{name} does not annotate its return type", f"annotate it as {RETURNS}")
    if not _is_returned(kinds["return"]):
        raise OperationError(f"{name} returns {_shown(kinds['return'])}", f"return {RETURNS}")


def _check_options(name: str, kinds: Mapping[str, Any], arguments: list[str]) -> None:
    """Raise OperationError unless a graph node can take the fields of options in their place."""
    for argument in arguments:
        kind = kinds[argument]
        if not is_options(kind):
            continue
        if argument != arguments[-1]:
            raise OperationError(
                f"{name} takes options, {argument}: {_shown(kind)}, before its argument {arguments[-1]!r}",
                "make the options its last argument",
            )
        if kind.__hash__ is None:
            raise OperationError(
                f"{name} takes options of the class {_shown(kind)}, which can change", "declare it with @attrs.frozen"
            )
        fields, others = get_type_hints(kind), set(arguments[:-1])
        for field in attrs.fields(kind):
            if not field.init or field.kw_only or not _is_taken(fields[field.name], OPTIONS):
                raise OperationError(
                    f"{name} takes options of the class {_shown(kind)}, whose field {field.name} is not a value that "
                    "its constructor takes by position",
                    "annotate it as int, float, bool, str, or one of them or None",
                )
            if field.name in others:
                raise OperationError(
                    f"{name} has an argument {field.name!r}, and so have its options", "rename one of them"
                )


def _is_taken(kind: Any, kinds: tuple[Any, ...] = ARGUMENTS) -> bool:
    if get_origin(kind) in (Union, UnionType):
        some = [each for each in get_args(kind) if each is not NoneType]
        return len(some) == 1 and some[0] in kinds
    return kind in kinds


def _is_returned(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        return bool(parts) and all(part is Tensor for part in parts)
    return kind in (Tensor, NoneType)


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _is_bound(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0 and math.isfinite(value)
