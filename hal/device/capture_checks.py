"""The lock of graph captures, checks of their outputs and torch modes, and the error that a failed capture raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from hal.errors import CaptureError, DeviceError, DeviceOutOfMemory, GraphError, HalError

CAPTURING = threading.RLock()
"""Held during a capture, and while a runner that captures or compiles is created. Replays do not acquire it."""
_under_way = False
"""Whether the thread that holds the lock is capturing."""


def begin_capturing() -> None:
    """Mark this thread, which holds :data:`CAPTURING`, as capturing.

    Raises:
        GraphError: it is capturing already.
    """
    global _under_way
    if _under_way:
        raise GraphError("a capture began inside another", "end the first capture before beginning the next")
    _under_way = True


def end_capturing() -> None:
    """Mark this thread as not capturing."""
    global _under_way
    _under_way = False


def is_capturing() -> bool:
    """Return whether this thread is capturing."""
    if not CAPTURING.acquire(blocking=False):  # Another thread holds it.
        return False
    try:
        return _under_way
    finally:
        CAPTURING.release()


def check_not_capturing() -> None:
    """Raise GraphError if this thread is capturing."""
    if is_capturing():
        raise GraphError("close() was called inside a capture", "call close() after the capture has ended")


MEMORY_REMEDY = f"capture fewer sizes: lower compilation.max_capture_size; or {DeviceOutOfMemory.REMEDY}"
"""The remedy of a capture that ran out of memory."""


def innermost_modes() -> tuple[Any, Any]:
    """Return the innermost dispatch mode and function mode of torch in this thread, or None for each that is absent."""
    dispatch, functions = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    return dispatch[-1] if dispatch else None, functions[-1] if functions else None


def check_outputs(outputs: Any) -> None:
    """Raise CaptureError for outputs other than tensors in tuples, lists and dicts, which have no fixed address."""
    for leaf in tree_iter(outputs):
        if not isinstance(leaf, Tensor | int | float | None):
            raise CaptureError(
                f"the captured function returned a {type(leaf).__name__}, whose tensors replays would not write",
                "return tensors, or tuples, lists or dicts of them",
            )


def failure_of(
    error: BaseException, raised: BaseException | None, explain: Callable[[Exception], HalError | None]
) -> tuple[BaseException, BaseException]:
    """Return the exception that a failed capture raises, and its cause; both are equal if it propagates unchanged.

    Args:
        error: the exception that ended the capture.
        raised: the exception of the captured function, if any.
        explain: ``Graph._explain`` of the driver.
    """
    first = raised if raised is not None and isinstance(error, Exception) else error
    if first is not error:
        first.add_note(f"ending the capture then failed: {type(error).__name__}: {error}")
    cause = first
    while isinstance(cause, DeviceError) and cause.__cause__ is not None:  # find the vendor's exception
        cause = cause.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, HalError):
        return first, first
    known = explain(cause)
    if isinstance(known, CaptureError):
        return known, first
    if first is raised or isinstance(first, HalError):
        return first, first
    return known or CaptureError(
        f"the capture failed: {type(first).__name__}: {first}",
        "run the function eagerly; if that succeeds, report the failure to the driver's vendor",
    ), first
