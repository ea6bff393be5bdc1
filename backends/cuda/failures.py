"""What CUDA's and torch's exceptions mean, and the remedy for each that a user can do something about."""

from __future__ import annotations

import torch

from hal.device.graph_base import MEMORY_REMEDY
from hal.errors import CaptureError, DeviceError, DeviceOutOfMemory, HalError

_MOVE = "move it out of the captured function, or keep the value on the device"
CAPTURE_REMEDIES = (
    # In the order in which they are looked for: the general ones last.
    ("unless the CPU tensor is pinned", "it copies between the GPU and memory of the host that is not pinned", _MOVE),
    ("Triton Error", "a kernel in Triton could not be loaded or launched in it",
     "run the function once before it is captured, which shows whether the capture is at fault"),
    ("has unjoined work", "it leaves a stream that was not joined",
     "make the capturing stream wait for every stream it forked"),
    ("dependency created on uncaptured work", "it depends on work that was not captured",
     "launch all of it inside the captured function"),
    ("legacy stream depend on a capturing", "it uses the default stream, which no capture can join",
     "launch everything on the current stream"),
    ("not ended in the same stream", "it ends on another stream than it began", "leave the current stream as it was"),
    ("would result in a merge of separate capture", "it depends on two captures", "capture one graph at a time"),
    ("capture sequence from another thread", "it ends on another thread than it began", "capture in one thread"),
    ("not permitted when stream is capturing",
     "it synchronises, allocates beside torch or calls what a capture does not allow, such as reading a value back",
     _MOVE),
    ("not permitted on an event last recorded in a capturing stream",
     "it waits for an event of its own capture on the host", _MOVE),
    ("due to a previous error during capture", "something before broke the capture", "see the first error"),
)  # fmt: skip
"""A phrase of the error, what the captured function does, and what to do about it."""

_RESTART = "restart the process: CUDA serves a process no more after this"
DEVICE_REMEDIES = (
    ("illegal memory access", "a kernel read or wrote memory that is not its own",
     f"{_RESTART}. CUDA_LAUNCH_BLOCKING=1 says at which call, compute-sanitizer in which kernel"),
    ("misaligned address", "a kernel read or wrote a misaligned address",
     f"{_RESTART}. compute-sanitizer says in which kernel"),
    ("device-side assert", "a kernel found a value out of range, such as a token id or a slot",
     f"check the batch's indices, and {_RESTART}. CUDA_LAUNCH_BLOCKING=1 says at which call"),
    ("unspecified launch failure", "a kernel failed", f"{_RESTART}. compute-sanitizer says which"),
    ("no kernel image is available", "the installed torch, or a library, has no code for this GPU's generation",
     "install a build that lists it: torch.cuda.get_arch_list() says what torch has"),
    ("uncorrectable ECC", "the GPU's memory is damaged", "take the GPU out of service; nvidia-smi -q -d ECC says more"),
    ("driver version is insufficient", "NVIDIA's driver is older than the CUDA that torch is built for",
     "upgrade the driver, or install a torch for an older CUDA"),
    ("busy or unavailable", "another process holds the GPU for itself", "end that process, or name another GPU"),
)  # fmt: skip
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def explain(error: BaseException) -> HalError | None:
    """The typed error for what torch raised of CUDA, or None if it is none of the device's."""
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
    """As :func:`explain`, but CaptureError for what a capture does not allow, or lacks.

    The notes of an exception of CUDA's count too: they say how the capture ended.
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
    """The first line of an exception's text, which says what failed."""
    return str(error).strip().partition("\n")[0][:300]
