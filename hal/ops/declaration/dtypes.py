"""The dtypes of an operation's tensors: how a declaration spells them.

An argument's dtype is a ``torch.dtype``; ``FLOATING``; the name of another argument, whose dtype it has (or which
it is, for an argument that is a dtype); or a tuple of these, of which it has any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Final, TypeAlias

import torch

from hal.errors import OperationError, nearest


class Kind(Enum):
    """Dtypes that differ between steps."""

    FLOATING = "floating"

    def __repr__(self) -> str:
        return self.name


FLOATING: Final = Kind.FLOATING
"""The dtype that the step computes in: floating, and the same for all tensors of a call that are declared so."""

Dtype: TypeAlias = torch.dtype | Kind | str
"""A ``torch.dtype``, ``FLOATING``, or an argument's name."""
Dtypes: TypeAlias = tuple[Dtype, ...]
"""What a tensor's dtype may be."""


def parse_dtypes(given: object, what: str, arguments: Collection[str]) -> Dtypes:
    """Read a dtype as it is declared.

    Args:
        given: the declaration.
        what: is declared so, for the error.
        arguments: names that it may hold.

    Raises:
        OperationError: it is not spelled as this module says.
    """
    several = given if isinstance(given, tuple) else (given,)
    for each in several:
        if isinstance(each, str) and each not in arguments:
            raise OperationError(
                f"{what} is declared with the dtype of {each!r}, which is no other argument", nearest(each, arguments)
            )
        if not isinstance(each, (torch.dtype, Kind, str)):
            raise OperationError(
                f"{what} is declared with the dtype {each!r}",
                "give a torch.dtype, FLOATING, the name of an argument, or a tuple of these",
            )
    if not several:
        raise OperationError(f"{what} is declared with no dtype", "name one, or leave out the parentheses")
    return several


def shown(dtypes: Iterable[torch.dtype]) -> str:
    """Dtypes as a person writes them: ``float32 or int8``."""
    return " or ".join(sorted(str(each).removeprefix("torch.") for each in dtypes))
