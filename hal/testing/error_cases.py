"""Cases of errors: unsupported configurations are refused, and exceptions reach the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.errors import ConfigError, DeviceOutOfMemory, HalError, OperationError
from hal.ops.declaration.operation import Operation
from hal.ops.kernels.kernel_table import Kernel
from hal.testing.case import Case, raises, require
from hal.testing.model_cases import ModelRun
from hal.testing.operation_calls import largest_sample, nth_sample
from hal.testing.step_plans import run_plan
from hal.testing.target import Target, dtype_name, reference_backend

BLOCK_SIZES = (1, 7, 64, 100, 8192)
"""Includes sizes that no driver with a list of block sizes supports."""


def cases(target: Target) -> Iterator[Case]:
    """Yield ``errors/...``."""
    for name, config in (
        ("compiler", {"compilation": {"compiler": "no-such-compiler"}}),
        ("prefill-compiler", {"compilation": {"prefill": {"compiler": "no-such-compiler"}}}),
        ("pass", {"compilation": {"compiler": target.backend.compilers[-1], "passes": {"no-such-pass": True}}}),
        ("option", {"options": {"no_such_option": 1}}),
        ("key", {"no_such_key": 1}),
    ):
        if name != "option" or target.driver is not None:
            yield Case(f"errors/unknown-{name}", partial(_refused, target, config))
    yield Case("errors/dtypes", partial(_dtypes, target))
    yield Case("errors/block-sizes", partial(_block_sizes, target))
    yield Case("errors/unread-key", partial(_unread_key, target))
    for name in target.backend.kernels:
        yield Case(f"errors/kernel/{name}", partial(_reaches_the_caller, target, ops.operation(name)))
        yield Case(f"errors/requires-grad/{name}", partial(_requires_grad, target, ops.operation(name)))
    yield Case("errors/step", partial(_step, target))
    yield Case("errors/not-active", partial(_not_active, target))
    yield Case("errors/explain", partial(_explain, target))


def _refused(target: Target, config: Mapping[str, Any]) -> None:
    raises(ConfigError, partial(target.open, **config), f"opening the backend with {config}")


def _dtypes(target: Target) -> None:
    """Check that the backend opens with exactly the dtypes in its limits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        config = {"dtype": dtype_name(dtype)}
        if dtype in target.backend.limits.dtypes:
            target.open(**config)
        else:
            _refused(target, config)


def _block_sizes(target: Target) -> None:
    """Check that the backend opens with exactly the block sizes in its limits."""
    known = target.backend.limits.block_sizes
    for size in dict.fromkeys((*known, *BLOCK_SIZES)):
        config = {"cache": {"block_size": size}}
        if not known or size in known:
            require(target.open(**config).block_size == size, f"block_size {size} is accepted, but not used")
        else:
            _refused(target, config)


def _unread_key(target: Target) -> None:
    """Check that a configuration key that the compiler does not read is refused."""
    _refused(target, {"compilation": {"compiler": "eager", "torch_compile_max_bs": 4}})


def _reaches_the_caller(target: Target, operation: Operation) -> None:
    """Check that a kernel raises if its tensor arguments are None."""
    backend = target.activated()
    sample = nth_sample(operation, largest_sample(operation), backend.limits.dtypes[0], backend.device.torch)
    given = [None if isinstance(value, Tensor) else value for value in sample]
    try:
        with torch.inference_mode():
            result = operation.function(*given)
            backend.device.synchronize()
    except Exception:  # any type will do; it must reach the caller
        return
    raise AssertionError(f"{operation.name} was given None for its tensors and returned {result!r:.80}; it must raise")


def _requires_grad(target: Target, operation: Operation) -> None:
    backend = target.activated()
    sample = list(nth_sample(operation, largest_sample(operation), backend.limits.dtypes[0], backend.device.torch))
    place = next((at for at, each in enumerate(sample) if isinstance(each, Tensor) and each.is_floating_point()), None)
    if place is None:
        return
    sample[place] = sample[place].clone().requires_grad_(True)
    try:
        operation.node(*sample)
    except OperationError:
        return
    raise AssertionError(f"the graph node of {operation.name} accepted a tensor that requires grad")


class _Planted(RuntimeError):
    """Raised deliberately by a kernel."""


def _step(target: Target) -> None:
    """Check that an exception in a kernel reaches the caller of the step, and that the next step is correct."""
    run = ModelRun(target, "qwen3", target.backend.limits.dtypes[0], "eager")
    runner = run.shared_runner()  # before the interception, which must not affect the creation of the runner

    def wrap(operation: Operation, kernel: Kernel) -> Kernel:
        def raising(*args: Any, **kwargs: Any) -> Any:
            raise _Planted("planted in silu_and_mul")

        return raising if operation.name == "silu_and_mul" else kernel

    raised = False
    try:
        with ops.intercepted(wrap):
            run_plan(runner, run.plan)
    except _Planted:
        raised = True
    require(raised, "a kernel raised an exception in a step, and the step returned normally")
    run.check_plan(run.plan)


def _not_active(target: Target) -> None:
    """Check that a runner's steps use its backend while another one is active, also in another thread."""
    run = ModelRun(target, "qwen3", target.backend.limits.dtypes[0], "eager")
    runner = run.shared_runner()
    batch = runner.batch([[1, 2]], [[1]])
    expected = runner.step(batch).logits.cpu()
    reference_backend(torch.float32, 64, 16).activate()
    with ThreadPoolExecutor(1) as threads:
        found = [runner.step(batch).logits.cpu(), threads.submit(lambda: runner.step(batch).logits.cpu()).result()]
    for each in found:
        require(torch.equal(each, expected), "a runner's logits differ while another backend is active")


def _explain(target: Target) -> None:
    explain: Callable[[BaseException], HalError | None] = target.activated().explain
    require(explain(ValueError("mine")) is None, "explain() converted an exception that is not the device's")
    out_of_memory = explain(torch.OutOfMemoryError("planted"))
    require(isinstance(out_of_memory, DeviceOutOfMemory), "explain() did not recognize torch.OutOfMemoryError")
