"""The dtypes of an operation's tensors, and their syntax in a declaration.

A dtype is a ``torch.dtype``; ``FLOATING``; the name of another argument, which has the same dtype, or whose value is
the dtype; or a tuple of these: alternatives of an argument, and of a result the first that a call gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final, TypeAlias

import torch

from hal.errors import OperationError, nearest


class Kind(Enum):
    """Dtypes that vary between steps."""

    FLOATING = "floating"

    def __repr__(self) -> str:
        return self.name


FLOATING: Final = Kind.FLOATING
"""The compute dtype of the step: floating-point, and the same for all tensors of a call that declare it."""

Dtype: TypeAlias = torch.dtype | Kind | str
"""A ``torch.dtype``, ``FLOATING``, or an argument's name."""
Dtypes: TypeAlias = tuple[Dtype, ...]
"""The alternative dtypes of a tensor."""


def parse_dtypes(given: object, what: str, arguments: Collection[str]) -> Dtypes:
    """Parse a declared dtype.

    Args:
        given: the declaration.
        what: the name of the declared tensor, for errors.
        arguments: the argument names that it may use.

    Raises:
        OperationError: the syntax is not that of this module.
    """
    several = given if isinstance(given, tuple) else (given,)
    for each in several:
        if isinstance(each, str) and each not in arguments:
            raise OperationError(
                f"{what} is declared with the dtype of {each!r}, which is not another argument",
                nearest(each, arguments),
            )
        if not isinstance(each, (torch.dtype, Kind, str)):
            raise OperationError(
                f"{what} is declared with the dtype {each!r}",
                "use a torch.dtype, FLOATING, the name of an argument, or a tuple of these",
            )
    if not several:
        raise OperationError(f"{what} is declared with no dtype", "declare one or more dtypes in the tuple")
    return several


def format_dtypes(dtypes: Iterable[torch.dtype]) -> str:
    """Return dtypes as text: ``float32 or int8``."""
    return " or ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
