"""Tests for the explanations of CUDA errors, given the exceptions that torch raises."""

from __future__ import annotations

import pytest
import torch
from hal.backends.cuda.failures import CAPTURE_REMEDIES, DEVICE_REMEDIES, explain, explain_in_capture, first_line

from hal.errors import CaptureError, DeviceError, DeviceOutOfMemory

TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB"
        ),
        torch.AcceleratorError("CUDA error: out of memory" + TAIL),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory(error: BaseException) -> None:
    found = explain(error)
    assert type(found) is DeviceOutOfMemory
    assert "lower cache.num_tokens" in found.remedy
    captured = explain_in_capture(error)
    assert type(captured) is CaptureError
    assert "no memory left for the capture" in captured.problem
    assert "lower compilation.max_capture_size" in captured.remedy


@pytest.mark.parametrize(
    ("text", "says", "remedy"),
    [
        ("an illegal memory access was encountered", "memory out of bounds", "compute-sanitizer"),
        ("something that nobody has met", "the GPU failed: CUDA error: something", "run the step again"),
    ],
)
def test_a_failure_of_the_device(text: str, says: str, remedy: str) -> None:
    found = explain(torch.AcceleratorError(f"CUDA error: {text}{TAIL}"))
    assert type(found) is DeviceError
    assert says in found.problem
    assert remedy in found.remedy
    assert "stacktrace" not in found.problem


def test_every_phrase_of_the_tables_is_looked_for() -> None:
    for phrase, problem, remedy in DEVICE_REMEDIES:
        found = explain(torch.AcceleratorError(f"CUDA error: {phrase}"))
        assert found is not None
        assert (problem in found.problem, found.remedy) == (True, remedy)
    for phrase, cause, remedy in CAPTURE_REMEDIES:
        captured = explain_in_capture(RuntimeError(f"CUDA error: {phrase}"))
        assert type(captured) is CaptureError
        assert (cause in captured.problem, captured.remedy) == (True, remedy)


@pytest.mark.parametrize("error", [ValueError("a mistake"), RuntimeError("shapes differ"), KeyError("CUDA")])
def test_what_is_not_the_devices(error: Exception) -> None:
    assert explain(error) is None


def test_a_capture_that_breaks_says_why() -> None:
    text = "CUDA error: operation not permitted when stream is capturing" + TAIL
    found = explain_in_capture(torch.AcceleratorError(text))
    assert type(found) is CaptureError
    assert "it synchronizes" in found.problem
    assert "move it out of the captured function" in found.remedy
    copied = explain_in_capture(
        RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
            "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
        )
    )
    assert type(copied) is CaptureError
    assert "host memory that is not pinned" in copied.problem


@pytest.mark.parametrize(
    ("error", "known"), [(RuntimeError("CUBLAS: CUDA error"), CaptureError), (RuntimeError("mine"), type(None))]
)
def test_what_the_end_of_a_capture_says_counts_for_errors_of_cuda(error: Exception, known: type) -> None:
    """CUDA errors are explained by the error at the end of the capture.

    Any other exception between a fork and its join also leaves work unjoined, and is raised unchanged.
    """
    error.add_note("the capture's end: CUDA error: capturing stream has unjoined work")
    found = explain_in_capture(error)
    assert type(found) is known
    assert found is None or "it leaves a stream that was not joined" in found.problem


def test_any_other_exception_of_the_function_is_not_the_captures() -> None:
    assert explain_in_capture(ZeroDivisionError("division by zero")) is None
    assert type(explain_in_capture(torch.AcceleratorError("CUDA error: misaligned address"))) is DeviceError


def test_the_first_line() -> None:
    assert first_line(RuntimeError(f"\n  one{TAIL}")) == "one"
