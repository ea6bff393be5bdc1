"""Mapping of CANN's error codes, in torch_npu's exceptions, to hal's errors and their remedies."""

from __future__ import annotations

import re

import torch

from hal.device.capture_checks import MEMORY_REMEDY
from hal.errors import CaptureError, CommunicationError, DeviceError, DeviceOutOfMemory, HalError

OUT_OF_MEMORY = (200000, 207001, 107002)
OUT_OF_STREAMS = 207008
CAPTURE_BROKEN = 507903
"""The capture failed earlier; the text contains the first code."""
EXECUTION = range(507000, 507900)
"""Codes of execution on the device; higher codes are those of captures."""

OTHER_RANKS = {107020: "another rank did not join a collective in time", 507057: "another rank failed or ended"}
"""Codes of collectives that other ranks made fail. Sources: rt_error_codes.h; HCCL's HCCL_EXEC_TIMEOUT.md."""
RANKS_REMEDY = "look for the first error of another rank; the group cannot be used again, so start the ranks anew"


_CODE = re.compile(r"error code(?: is |:\s*)(\d{6})")
_INNER = re.compile(r"\b(10[0-9]{4}|20[0-9]{4}|50[0-9]{4})\b")
_HCCL = re.compile(r"\bHccl[A-Z]\w+|\bEI\d{4}\b")
"""HCCL's functions and error numbers in a text."""

_NOT_CAPTURED = "move it out of the captured function, or keep the value on the device"
CAPTURE_REMEDIES = {
    107000: ("it makes a call that a capture does not allow, such as a copy of unpinned memory", _NOT_CAPTURED),
    107024: ("it depends on work that was not captured", "launch all of it inside the captured function"),
    107025: ("it leaves a stream that was not joined", "make the capturing stream wait for every stream it forked"),
    107026: ("it depends on two captures", "capture one graph at a time"),
    107027: ("it synchronizes with or queries a stream that is being captured", _NOT_CAPTURED),
    107028: ("it uses an event recorded in the capture in a call that a capture does not allow", _NOT_CAPTURED),
    107029: ("it waits outside the capture for an event recorded in it", _NOT_CAPTURED),
    107030: (
        "it makes a call that a capture does not allow, such as a read back to the host or a copy from unpinned memory",
        _NOT_CAPTURED,
    ),
    107031: ("it uses the default stream, which no capture can join", "launch everything on the current stream"),
    107032: ("it depends on two captures", "capture one graph at a time"),
    107033: ("a task group was left open", "see the first error"),
    107034: ("it launches on another stream while a task group is open", "see the first error"),
    107036: ("it ends on another stream than it began on", "restore the current stream before it returns"),
    107038: ("it ends on another thread than it began on", "capture in one thread"),
    107041: ("it copies memory that is not pinned, on another stream or thread", _NOT_CAPTURED),
    107046: ("it depends on two captures", "capture one graph at a time"),
    OUT_OF_STREAMS: (
        "the device has no stream left for it",
        "capture fewer sizes: lower compilation.max_capture_size, or shorten compilation.capture_sizes; other "
        "processes on the device take streams too",
    ),
    507009: ("it launches a task that a task group cannot hold", "see the first error"),
}

_AGAIN = "run the step again: all work enqueued since the last wait is lost"
DEVICE_REMEDIES = {
    507011: ("a model's execution failed on the device", _AGAIN),
    507014: ("a kernel on the device timed out", _AGAIN + "; report the kernel if it repeats"),
    507015: ("a kernel on the device failed", _AGAIN + "; ASCEND_LAUNCH_BLOCKING=1 names the kernel"),
    507017: ("an AI CPU kernel on the device timed out", _AGAIN),
    507018: ("an AI CPU kernel on the device failed", _AGAIN),
    507046: ("a wait for the device timed out", "look for a wait on an event that no stream records"),
    OUT_OF_STREAMS: CAPTURE_REMEDIES[OUT_OF_STREAMS],
}


def codes_of(error: BaseException) -> list[int]:
    """Return CANN's codes in an exception's text, torch_npu's own first; empty if CANN did not cause it."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    first = [int(each) for each in _CODE.findall(text)]
    if not first:
        return []
    return list(dict.fromkeys([*first, *(int(each) for each in _INNER.findall(text))]))


def explain(error: BaseException) -> HalError | None:
    """Return the HalError for an exception of torch_npu's; None if the device did not cause it."""
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceOutOfMemory(f"the NPU has no memory left: {first_line(error)}", DeviceOutOfMemory.REMEDY)
    codes = codes_of(error)
    for code in codes:
        if code in OUT_OF_MEMORY:
            return DeviceOutOfMemory(f"the NPU has no memory left: CANN error {code}", DeviceOutOfMemory.REMEDY)
        if code in OTHER_RANKS or _HCCL.search(str(error)):
            problem = OTHER_RANKS.get(code, "a collective failed")
            return CommunicationError(f"{problem}: CANN error {code}; {_hccl_line(error)}", RANKS_REMEDY)
        if code in DEVICE_REMEDIES:
            problem, remedy = DEVICE_REMEDIES[code]
            return DeviceError(f"{problem}: CANN error {code}; {first_line(error)}", remedy)
    if codes:
        return DeviceError(f"CANN error {codes[0]}: {first_line(error)}", "look up the code in CANN's documentation")
    return None


def explain_in_capture(error: BaseException) -> HalError | None:
    """Return the HalError for an exception in a capture; None if neither capture nor device caused it.

    The exception's notes are searched for codes too: they tell how the capture ended.
    """
    codes = codes_of(error)
    if codes:
        codes += codes_of(RuntimeError(" ".join(getattr(error, "__notes__", ()))))
    if isinstance(error, torch.OutOfMemoryError) or set(codes) & set(OUT_OF_MEMORY):
        return CaptureError(f"the NPU has no memory left for the capture: {first_line(error)}", MEMORY_REMEDY)
    # Ending a broken capture raises CAPTURE_BROKEN, followed by the original code: look at that one first.
    for code in sorted(codes, key=lambda each: each == CAPTURE_BROKEN):
        if code in CAPTURE_REMEDIES:
            cause, remedy = CAPTURE_REMEDIES[code]
            return CaptureError(
                f"the captured function cannot be captured: {cause} ({code}; {first_line(error)})", remedy
            )
    return explain(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, which names the call."""
    return str(error).strip().partition("\n")[0][:300]


def _hccl_line(error: BaseException) -> str:
    """Return the line of an exception's text in which HCCL says what failed, or else its first line."""
    lines = [line.strip() for line in str(error).splitlines() if _HCCL.search(line)]
    return lines[0][:300] if lines else first_line(error)
