"""The errors of the emulated CANN. Each has a problem and a remedy."""

from __future__ import annotations


class EmulationError(Exception):
    """The emulated CANN cannot do what was asked; base of the other errors.

    Args:
        problem: the invalid value or state, and the rule that it violates.
        remedy: the action that fixes it, such as a command.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"


class InvalidOption(EmulationError):
    """An option of the emulated machine is unknown, or has an invalid value."""


class Unavailable(EmulationError):
    """The machine or the environment lacks what the emulated CANN requires."""
