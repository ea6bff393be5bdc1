"""The error family. Every error says what was asked, what was found, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HalError(Exception):
    """Base of every error that hal raises on purpose.

    Args:
        problem: what was asked and what was found, in one sentence or two.
        remedy: what the reader can do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"


class ConfigError(HalError):
    """A configuration that cannot be read, or that asks for what does not exist."""


class DriverError(HalError):
    """Something about a driver; the subclasses say what."""


class DriverNotFound(DriverError):
    """No driver of that name is installed."""


class DriverUnavailable(DriverError):
    """The driver is installed but cannot run here: its probe said no, or raised."""


class DriverIncompatible(DriverError):
    """The driver was written for another version of the driver API, or lacks a part of it."""


class OperationError(HalError):
    """An operation was declared or called in a way that its declaration forbids."""


class UnknownOperation(OperationError, AttributeError):
    """No operation of that name is declared."""


class MissingKernel(OperationError):
    """Strict mode: the active driver has no kernel for an operation that was called."""


class GraphError(HalError):
    """A graph was used out of order, such as replayed before its capture."""


class CaptureError(GraphError):
    """A graph could not be captured."""


class HostValueError(GraphError):
    """A replay was given host values of a wrong name, number, shape or dtype. Nothing was launched."""


class DeviceError(HalError):
    """The device failed at work that it had been given; it is reported where the host next waits."""


class DeviceOutOfMemory(DeviceError):
    """The device has no memory left for what was asked."""

    REMEDY = (
        "lower cache.num_tokens, max_prefill_tokens or compilation.max_capture_size, or give the device fewer sequences"
    )


class CompileError(HalError):
    """A model cannot be traced, or a compiler failed on it."""


class CheckpointError(HalError):
    """A checkpoint that is missing, damaged, unsafe, or does not fit its model."""


class ModelError(HalError):
    """A model class that does not do what :class:`hal.nn.CausalLM` asks of it, or that cannot be imported."""


class BatchError(HalError):
    """A batch or prompt that the model or the cache cannot take."""


class BackendNotActive(HalError):
    """A runner was used while another backend than its own is active."""


class ClosedError(HalError):
    """A backend, or a runner, cache or graph of it, was used after it had been closed."""


class NumericsError(HalError):
    """A computation gave NaN where a number is needed."""


def said(error: BaseException) -> str:
    """Return the type and the message of an exception that is not hal's."""
    return f"{type(error).__name__}: {error}"


LISTED = 40
"""Names that a message lists; a checkpoint has thousands."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase for an error message: the known name most like ``name``, then the first of the known."""
    names = sorted(known)
    if not names:
        return "there are none"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]!r}? " if close else ""
    more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{guess}known: {', '.join(names[:LISTED])}{more}"
