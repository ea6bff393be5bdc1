"""What torch_npu's exceptions mean: CANN's error codes, and the remedy for each that a user can do something about."""

from __future__ import annotations

import re

import torch

from hal.device.graph_base import MEMORY_REMEDY
from hal.errors import CaptureError, DeviceError, DeviceOutOfMemory, HalError

OUT_OF_MEMORY = (200000, 207001, 107002)
OUT_OF_STREAMS = 207008
CAPTURE_BROKEN = 507903
"""The capture failed earlier; the text has the first code."""
EXECUTION = range(507000, 507900)
"""Of what the device ran, or should have run; those behind it are of captures."""

_CODE = re.compile(r"error code(?: is |:\s*)(\d{6})")
_INNER = re.compile(r"\b(10[0-9]{4}|20[0-9]{4}|50[0-9]{4})\b")

# Of captures.
_NOT_CAPTURED = "move it out of the captured function, or keep the value on the device"
CAPTURE_REMEDIES = {
    107000: ("it gives CANN what a capture does not take, such as a copy of memory that is not pinned", _NOT_CAPTURED),
    107024: ("it depends on work that was not captured", "launch all of it inside the captured function"),
    107025: ("it leaves a stream that was not joined", "make the capturing stream wait for every stream it forked"),
    107026: ("it depends on two captures", "capture one graph at a time"),
    107027: ("it synchronises, or asks something of a stream that is being captured", _NOT_CAPTURED),
    107028: ("it uses an event of its own capture where no capture may", _NOT_CAPTURED),
    107029: ("it waits for an event of its own capture outside it", _NOT_CAPTURED),
    107030: ("it calls what a capture does not allow, such as reading a value back or copying from unpinned memory",
             _NOT_CAPTURED),
    107031: ("it uses the default stream, which no capture can join", "launch everything on the current stream"),
    107032: ("it depends on two captures", "capture one graph at a time"),
    107033: ("a task group was left open", "see the first error"),
    107034: ("it launches on another stream while a task group is open", "see the first error"),
    107036: ("it ends on another stream than it began", "leave the current stream as it was"),
    107038: ("it ends on another thread than it began", "capture in one thread"),
    107041: ("it copies memory that is not pinned, on another stream or thread", _NOT_CAPTURED),
    107046: ("it depends on two captures", "capture one graph at a time"),
    OUT_OF_STREAMS: (
        "the device has no stream left for it",
        "capture fewer sizes: lower compilation.max_capture_size, or shorten compilation.capture_sizes; other "
        "processes on the device take streams too",
    ),
    507009: ("it launches what a task group cannot hold", "see the first error"),
}  # fmt: skip

# Of work that ran.
_AGAIN = "what the device was given since the last wait is lost: run the step again"
DEVICE_REMEDIES = {
    507011: ("a model's execution failed on the device", _AGAIN),
    507014: ("a kernel on the device ran into its time limit", _AGAIN + ", and report the kernel if it repeats"),
    507015: ("a kernel on the device failed", _AGAIN + ", with ASCEND_LAUNCH_BLOCKING=1 to see which"),
    507017: ("an AI CPU kernel on the device ran into its time limit", _AGAIN),
    507018: ("an AI CPU kernel on the device failed", _AGAIN),
    507046: ("a wait for the device ran into its time limit", "look for work that waits for what nobody starts"),
    OUT_OF_STREAMS: CAPTURE_REMEDIES[OUT_OF_STREAMS],
}  # fmt: skip


def codes_of(error: BaseException) -> list[int]:
    """CANN's codes in the text of an exception, the one that torch_npu names first; none if it is not of CANN."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    first = [int(each) for each in _CODE.findall(text)]
    if not first:
        return []
    return list(dict.fromkeys([*first, *(int(each) for each in _INNER.findall(text))]))


def explain(error: BaseException) -> HalError | None:
    """The typed error for what torch_npu raised, or None if it is none of the device's."""
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceOutOfMemory(f"the NPU has no memory left: {first_line(error)}", DeviceOutOfMemory.REMEDY)
    codes = codes_of(error)
    for code in codes:
        if code in OUT_OF_MEMORY:
            return DeviceOutOfMemory(f"the NPU has no memory left: CANN says {code}", DeviceOutOfMemory.REMEDY)
        if code in DEVICE_REMEDIES:
            problem, remedy = DEVICE_REMEDIES[code]
            return DeviceError(f"{problem}: CANN says {code}; {first_line(error)}", remedy)
    if codes:
        return DeviceError(f"CANN says {codes[0]}: {first_line(error)}", "look the code up in CANN's documents")
    return None


def explain_in_capture(error: BaseException) -> HalError | None:
    """As :func:`explain`, but CaptureError for what a capture does not allow, or lacks.

    The notes of an exception of CANN's count too: they say how the capture ended.
    """
    codes = codes_of(error)
    if codes:
        codes += codes_of(RuntimeError(" ".join(getattr(error, "__notes__", ()))))
    if isinstance(error, torch.OutOfMemoryError) or set(codes) & set(OUT_OF_MEMORY):  # of torch's, or for an event
        return CaptureError(f"the NPU has no memory left for the capture: {first_line(error)}", MEMORY_REMEDY)
    # The end of a capture that broke earlier says so, and then why.
    for code in sorted(codes, key=lambda each: each == CAPTURE_BROKEN):
        if code in CAPTURE_REMEDIES:
            cause, remedy = CAPTURE_REMEDIES[code]
            return CaptureError(
                f"the captured function cannot be captured: {cause} ({code}; {first_line(error)})", remedy
            )
    return explain(error)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, which names the call."""
    return str(error).strip().partition("\n")[0][:300]
