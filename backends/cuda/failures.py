"""Mapping of CUDA's and torch's exceptions to hal's errors and their remedies."""

from __future__ import annotations

import torch

from hal.device.capture_checks import MEMORY_REMEDY
from hal.errors import CaptureError, DeviceError, DeviceOutOfMemory, HalError

_MOVE = "move it out of the captured function, or keep the value on the device"
CAPTURE_REMEDIES = (
    # The first match wins: the general ones are last.
    ("unless the CPU tensor is pinned", "it copies between the GPU and host memory that is not pinned", _MOVE),
    (
        "Triton Error",
        "it could not load or launch a Triton kernel",
        "run the function without a capture to find out whether the capture causes the error",
    ),
    (
        "has unjoined work",
        "it leaves a stream that was not joined",
        "make the capturing stream wait for every stream it forked",
    ),
    (
        "dependency created on uncaptured work",
        "it depends on work that was not captured",
        "launch all of it inside the captured function",
    ),
    (
        "legacy stream depend on a capturing",
        "it uses the default stream, which no capture can join",
        "launch everything on the current stream",
    ),
    (
        "not ended in the same stream",
        "it ends on another stream than it began on",
        "restore the current stream before it returns",
    ),
    ("would result in a merge of separate capture", "it depends on two captures", "capture one graph at a time"),
    ("capture sequence from another thread", "it ends on another thread than it began on", "capture in one thread"),
    (
        "not permitted when stream is capturing",
        "it synchronizes, allocates outside torch or makes another call that a capture does not allow, such as a read "
        "back to the host",
        _MOVE,
    ),
    (
        "not permitted on an event last recorded in a capturing stream",
        "it waits on the host for an event recorded in the capture",
        _MOVE,
    ),
    ("due to a previous error during capture", "an earlier error broke the capture", "see the first error"),
)
"""A phrase of the error, its cause in the captured function, and its remedy."""

_RESTART = "restart the process, which cannot use CUDA after this error"
DEVICE_REMEDIES = (
    (
        "illegal memory access",
        "a kernel accessed memory out of bounds",
        f"{_RESTART}. CUDA_LAUNCH_BLOCKING=1 names the call, compute-sanitizer the kernel",
    ),
    ("misaligned address", "a kernel accessed a misaligned address", f"{_RESTART}. compute-sanitizer names the kernel"),
    (
        "device-side assert",
        "a kernel found a value out of range, such as a token id or a slot",
        f"check the batch's indices, and {_RESTART}. CUDA_LAUNCH_BLOCKING=1 names the call",
    ),
    ("unspecified launch failure", "a kernel failed", f"{_RESTART}. compute-sanitizer names the kernel"),
    (
        "no kernel image is available",
        "the installed torch, or a library, has no code for this GPU's generation",
        "install a build for it; torch.cuda.get_arch_list() lists the generations of the installed torch",
    ),
    (
        "uncorrectable ECC",
        "the GPU's memory is damaged",
        "take the GPU out of service; nvidia-smi -q -d ECC has the details",
    ),
    (
        "driver version is insufficient",
        "NVIDIA's driver is older than the CUDA that torch is built for",
        "upgrade the driver, or install a torch for an older CUDA",
    ),
    (
        "busy or unavailable",
        "another process has exclusive use of the GPU",
        "end that process, or set the option device_index to another GPU",
    ),
)
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def explain(error: BaseException) -> HalError | None:
    """Return the HalError for an exception of torch's or CUDA's; None if the device did not cause it."""
    text, of_cuda = first_line(error), _of_cuda(error)
    if isinstance(error, torch.OutOfMemoryError) or (of_cuda and any(each in text for each in OUT_OF_MEMORY)):
        return DeviceOutOfMemory(f"the GPU has no memory left: {text}", DeviceOutOfMemory.REMEDY)
    if not of_cuda:
        return None
    for phrase, problem, remedy in DEVICE_REMEDIES:
        if phrase in text:
            return DeviceError(f"{problem}: {text}", remedy)
    if "CUDA error" in text or isinstance(error, torch.AcceleratorError):
        return DeviceError(
            f"the GPU failed: {text}",
            "run the step again; if it repeats, restart the process with CUDA_LAUNCH_BLOCKING=1",
        )
    return None


def explain_in_capture(error: BaseException) -> HalError | None:
    """Return the HalError for an exception in a capture; None if neither capture nor device caused it.

    The exception's notes are searched too: they tell how the capture ended.
    """
    known = explain(error)
    if isinstance(known, DeviceOutOfMemory):
        return CaptureError(f"the GPU has no memory left for the capture: {first_line(error)}", MEMORY_REMEDY)
    texts = " ".join((str(error), *getattr(error, "__notes__", ()))) if _of_cuda(error) else ""
    for phrase, cause, remedy in CAPTURE_REMEDIES:
        if phrase in texts:
            return CaptureError(f"the captured function cannot be captured: {cause} ({first_line(error)})", remedy)
    return known


def _of_cuda(error: BaseException) -> bool:
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and "CUDA" in first_line(error)
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, which describes the failure."""
    return str(error).strip().partition("\n")[0][:300]
