"""The exception classes. Every error has a problem and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class HalError(Exception):
    """Base of all errors that hal raises.

    Args:
        problem: the invalid value or state, and the rule that it violates, in one or two sentences.
        remedy: the action that fixes it, such as a command or a configuration key.
        key: the key, parameter or field that is wrong, for programs; None if it is none, or not known.
    """

    def __init__(self, problem: str, remedy: str, *, key: str | None = None) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy
        self.key = key

    def reworded(self, problem: str, remedy: str) -> Self:
        """Return the same error in other words."""
        return type(self)(problem, remedy, key=self.key)

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"


class ConfigError(HalError):
    """A configuration is invalid, or asks for an unsupported feature."""


class UnknownKey(ConfigError):
    """A mapping has a key that its reader does not know."""


class DriverError(HalError):
    """A driver failed; see the subclasses."""


class DriverNotFound(DriverError):
    """No driver of that name is installed."""


class DriverUnavailable(DriverError):
    """The driver is installed but cannot run on this machine."""


class DriverIncompatible(DriverError):
    """The driver does not match this release's driver API."""


class OperationError(HalError):
    """The declaration of an operation is invalid, or a call violates it."""


class UnknownOperation(OperationError, AttributeError):
    """No operation of that name is declared."""


class MissingKernel(OperationError):
    """The active backend has no kernel for an operation that the configuration permits: strict, or invariant."""


class GraphError(HalError):
    """A graph was used out of order, such as replayed before its capture."""


class CaptureError(GraphError):
    """A graph could not be captured."""


class HostValueError(GraphError):
    """The host values of a replay have a wrong name, shape or dtype. Nothing was launched."""


class DeviceError(HalError):
    """The device failed. Asynchronous failures are raised where the host next waits."""


class DeviceOutOfMemory(DeviceError):
    """The device has too little free memory."""

    REMEDY = (
        "lower cache.num_tokens, max_prefill_tokens or compilation.max_capture_size, or give the device fewer sequences"
    )


class CommunicationError(HalError):
    """A collective failed, because a rank ended, was late, or called another one. The group cannot be used again."""


class CompileError(HalError):
    """A model cannot be traced or compiled."""


class CheckpointError(HalError):
    """A checkpoint is missing, damaged or unsafe, or does not match its model."""


class ModelError(HalError):
    """A model class cannot be imported, or does not implement the interface of :class:`hal.nn.CausalLM`."""


class BatchError(HalError):
    """A batch or prompt is invalid for the model or the cache."""


class BackendNotActive(HalError):
    """No backend is active, or another one than that for which a function was compiled."""


class ClosedError(HalError):
    """A closed backend, or a runner, cache or graph of one, was used."""


class AsleepError(HalError):
    """A runner, or hal.LLM, was used while it sleeps, or before the weights that it dropped were replaced."""


class NumericsError(HalError):
    """A computation returned NaN."""


def describe_exception(error: BaseException) -> str:
    """Return the type and message of an exception, as text."""
    return f"{type(error).__name__}: {error}"


LISTED = 40
"""Maximum number of names in a message; a checkpoint has thousands."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a name that a person wrote: the most similar known one, then the first known names."""
    names = sorted(known)
    close = most_similar(name, names)
    return (f"did you mean {close!r}? " if close else "") + listed(names)


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like one that a person wrote, or None if none is like it."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)), None)


def listed(known: Iterable[str]) -> str:
    """Return the first known names, for an error message about a name that a file gives.

    Such a name is no typing error, so that a similar one would be another thing.
    """
    names = sorted(known)
    if not names:
        return "none are known"
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"known: {', '.join(names[:LISTED])}{more}"
