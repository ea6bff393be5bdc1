"""A case: one thing that a driver must do, under a name that lists of exceptions can match."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from hal.drivers.backend import active_backend


class NotApplicable(Exception):
    """A case does not concern this backend, for the reason given; it counts as skipped."""


class Failure(AssertionError):
    """An operation that does not do what it declares.

    Args:
        problems: what is wrong, a sentence each.
        operation: its name.
        shapes: its arguments, readable.
        size: elements of all its arguments, to find the smallest that fails.
    """

    def __init__(self, problems: list[str], operation: str, shapes: str, size: int) -> None:
        super().__init__("\n".join([f"{operation}({shapes})", *problems]))
        self.operation = operation
        self.shapes = shapes
        self.size = size


@attrs.frozen
class Case:
    """One case.

    Attributes:
        name: ``area/subject/...``, stable from run to run.
        check: raises what is wrong.
    """

    name: str
    check: Callable[[], None]

    @property
    def area(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    def run(self) -> None:
        """Check it; whichever backend was active before is so again afterwards.

        Raises:
            AssertionError: the driver does other than it must.
            NotApplicable: the case does not concern this backend.
        """
        before = active_backend()
        try:
            self.check()
        finally:
            if before is not None and not before.closed:
                before.activate()


def unsupported(case: Case, pattern: str, reason: str) -> Case:
    """A case that its driver does without, tried all the same: where it fails, it counts as skipped.

    If it passes, it says that ``pattern``, the entry that names it, is out of date.
    """

    def check() -> None:
        try:
            case.check()
        except NotApplicable:
            raise
        except Exception as error:
            raise NotApplicable(reason) from error
        raise AssertionError(
            f"it passes, and the entry {pattern!r} of `unsupported` says: {reason}; take the entry out, or let its "
            "pattern match only what the driver still does without"
        )

    return attrs.evolve(case, check=check)


def raised_in(error: BaseException) -> str:
    """The name of the module whose code raised ``error``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def require(condition: bool, problem: str) -> None:
    """Raise AssertionError with ``problem`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(problem)
