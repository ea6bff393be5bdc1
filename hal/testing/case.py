"""A case: one named check of a driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from hal.drivers.backend import active_backend
from hal.errors import HalError


class NotApplicable(Exception):
    """The case does not apply to this backend; pytest reports it as skipped, with the message as the reason."""


class Failure(AssertionError):
    """An operation violates its declaration.

    Args:
        problems: one sentence per violation.
        size: number of elements of all arguments; the report selects the smallest failing call by it.
    """

    def __init__(self, problems: list[str], operation: str, shapes: str, size: int) -> None:
        super().__init__("\n".join([f"{operation}({shapes})", *problems]))
        self.operation = operation
        self.shapes = shapes
        self.size = size


@attrs.frozen
class Case:
    """A named check.

    Attributes:
        name: ``area/subject/...``, stable between runs.
        check: raises an exception if the driver violates its contract.
    """

    name: str
    check: Callable[[], None]

    @property
    def area(self) -> str:
        """Return the first part of the name."""
        return self.name.partition("/")[0]

    def run(self) -> None:
        """Run the check, then reactivate the backend that was active before.

        Raises:
            AssertionError: the driver violates its contract.
            NotApplicable: the case does not apply to this backend.
        """
        before = active_backend()
        try:
            self.check()
        finally:
            if before is not None and not before.closed:
                before.activate()


def unsupported(case: Case, pattern: str, reason: str) -> Case:
    """Return a case that runs ``case`` and counts as skipped if it fails.

    The returned case fails if ``case`` passes: the entry ``pattern`` of ``unsupported`` is then out of date.
    """

    def check() -> None:
        try:
            case.check()
        except NotApplicable:
            raise
        except Exception as error:
            raise NotApplicable(reason) from error
        raise AssertionError(
            f"the case passes, but the entry {pattern!r} of `unsupported` says: {reason}; remove the entry, or narrow "
            "its pattern to the cases that the driver does not support"
        )

    return attrs.evolve(case, check=check)


def raised_in(error: BaseException) -> str:
    """Return the name of the module that raised ``error``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def raises(kind: type[HalError], use: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless ``use`` raises an error of ``kind``, with a problem and a remedy."""
    try:
        use()
    except kind as error:
        require(
            bool(error.problem.strip() and error.remedy.strip()),
            f"{what}: the {kind.__name__} lacks a problem or a remedy",
        )
        return
    raise AssertionError(f"{what} raised no {kind.__name__}")


def require(condition: bool, problem: str) -> None:
    """Raise AssertionError with ``problem`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(problem)
