"""The checks and the speed of a device, and of several ranks.

The checks are a few of the conformance suite's, which together take seconds.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hal import ops
from hal.doctor.findings import Check, Measures
from hal.drivers.backend import Backend
from hal.errors import HalError
from hal.nn import WeightUse
from hal.ops import Draw
from hal.ops.form_samples import drawn_weight
from hal.ops.forms import FLOAT, Form
from hal.ops.tolerance import assert_agree
from hal.testing.case import NotApplicable
from hal.testing.graph_cases import inputs_in_place
from hal.testing.host_value_cases import lengths_change
from hal.testing.limit_cases import Paged
from hal.testing.operation_calls import Call
from hal.testing.operation_cases import check_call

REPORT = "report it to the driver's vendor"
OPERATIONS = ("embedding", "linear", "rms_norm", "rotary_embedding", "silu_and_mul", "greedy_sample")
"""The operations of a decoder step except attention; the conformance suite checks all operations."""
SAMPLES = 2
SIZE = 64
PROJECTION = 512, 640
"""Sizes of a weight that drivers bring into their own layout: the CPU's leaves small ones as they are."""
FORMS = FLOAT, Form("int8"), Form("int4", columns=128), Form("int8", inputs="int8")
HEAD_DIM = 128
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SHARD = 8, 64
SMALL_BYTES, LARGE_BYTES = 8 << 10, 64 << 20
SMALL_REPEATS, LARGE_REPEATS = 100, 5
COPY_BYTES = 64 << 20
COPIES = 7
LAUNCHES = 200
WARM, WARM_RANKS = 20, 2
IN_FLIGHT = 50
"""Launches between two synchronizations; with a full queue, the measurement would include waiting."""


def checks(backend: Backend) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and check functions, which return a description of their work.

    A check raises AssertionError if a result is wrong, and NotApplicable if it does not apply. ``backend`` must be
    active.
    """
    yield "matmul", partial(_matmul, backend)
    yield "projection", partial(_projection, backend)
    for form in FORMS:
        yield f"products of {form}", partial(_product, backend, form)
    for name in OPERATIONS:
        yield name, partial(_operation, backend, name)
    yield "attention", partial(_attention, backend)
    yield "graph", partial(_graph, backend)


def collective_checks(backend: Backend) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield names and check functions, as :func:`checks`, of the group of ranks that ``backend`` has joined."""
    for name in COLLECTIVES:
        yield name, partial(_collective, backend, name)


def checked(backend: Backend, name: str, check: Callable[[], str]) -> Check:
    """Run a check, and return its outcome."""
    try:
        with backend.translating_errors():
            return Check(name, "passed", check())
    except NotApplicable as reason:
        return Check(name, "skipped", str(reason))
    except HalError as error:
        return Check(name, "failed", error.problem, error.remedy)
    except AssertionError as error:  # a wrong result, or an exception of a kernel; the message has several lines
        if error.__cause__ is not None:
            traceback.print_exc()
        return Check(name, "failed", " ".join(str(error).split()), f"{REPORT}, or run its conformance tests")
    except Exception as error:
        traceback.print_exc()
        return Check(name, "failed", f"it raised {error!r}", REPORT)


def _matmul(backend: Backend) -> str:
    for dtype in backend.limits.dtypes:
        draw = Draw(dtype)
        # With values -1, 0 and 1 every dtype represents every sum exactly.
        left, right = (draw.integers(-1, 2, SIZE, SIZE).to(dtype) for _ in range(2))
        found = left.to(backend.device.torch) @ right.to(backend.device.torch)
        torch.testing.assert_close(found.cpu(), (left.float() @ right.float()).to(dtype), rtol=0, atol=0)
    return f"{SIZE} x {SIZE}, {_names(backend.limits.dtypes)}"


def _projection(backend: Backend) -> str:
    for dtype in backend.limits.dtypes:
        draw = Draw(dtype)
        x, weight = (draw.integers(-1, 2, rows, PROJECTION[1]).to(dtype) for rows in (2, PROJECTION[0]))
        held = backend.prepare_weights({"weight": weight.to(backend.device.torch)}, WeightUse("linear", dtype))
        found = backend.ops.linear(x.to(backend.device.torch), held["weight"])
        torch.testing.assert_close(found.cpu(), (x.float() @ weight.float().t()).to(dtype), rtol=0, atol=0)
    return f"prepared weights of {PROJECTION[0]} x {PROJECTION[1]}, {_names(backend.limits.dtypes)}"


def _product(backend: Backend, form: Form) -> str:
    found: dict[str, list[torch.dtype]] = {}
    for dtype in backend.limits.dtypes:
        draw, use = Draw(dtype, backend.device.torch), WeightUse("linear", dtype, form)
        numbers = (draw.normal(*PROJECTION), None, None) if form == FLOAT else drawn_weight(draw, form, *PROJECTION)
        given = zip(("weight", "weight_scale", "weight_zero_point"), numbers, strict=True)
        held = backend.prepare_weights({name: each for name, each in given if each is not None}, use)
        found.setdefault(backend.describe_kernel(held["weight"], use), []).append(dtype)
    return "; ".join(f"{_names(dtypes)}: {how}" for how, dtypes in found.items())


def _operation(backend: Backend, name: str) -> str:
    operation = ops.operation(name)
    for dtype in backend.limits.dtypes:
        for number in range(SAMPLES):
            check_call(backend, Call(operation, dtype, number, f"sample-{number}"), operation.function)
    kind = "kernel" if name in backend.kernels else "reference"
    return f"{kind}, {_names(backend.limits.dtypes)}"


def _attention(backend: Backend) -> str:
    dims, size = backend.limits.head_dims, backend.block_size
    head_dim, lengths = HEAD_DIM if not dims or HEAD_DIM in dims else dims[0], [size + 1, 1]
    for dtype in backend.limits.dtypes:
        Paged.filled(backend, dtype, size, head_dim, lengths).check([1, 1], lengths)
    return f"blocks of {size}, {_names(backend.limits.dtypes)}"


def _graph(backend: Backend) -> str:
    if "graph" not in backend.compilers:
        raise NotApplicable("the backend does not support graphs")
    inputs_in_place(backend)
    lengths_change(backend)
    return "captured, and replayed with new inputs and lengths"


def _collective(backend: Backend, name: str) -> str:
    operation, group, done = ops.operation(name), backend.mesh.tensor, []
    assert operation.over_shards is not None
    rows, width = SHARD[0] * group.size, SHARD[1]
    for dtype in backend.limits.dtypes:
        draws = [torch.Generator().manual_seed(each) for each in range(group.size)]
        # Every dtype represents every sum of such integers exactly.
        shards = [torch.randint(-4, 5, (rows, width), generator=draw).to(dtype) for draw in draws]
        found = operation.function(shards[group.rank].to(backend.device.torch), group.name)
        done.append((dtype, found, operation.over_shards([(each, group.name) for each in shards])[group.rank]))
    for dtype, found, expected in done:  # Only now, so that a rank whose results are wrong leaves no other waiting.
        assert_agree(operation, dtype, found, expected)
    return f"{rows} x {width}, {_names(backend.limits.dtypes)}"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in dtypes)


def measures(backend: Backend) -> Measures:
    """Measure the device of ``backend``; times are medians of several repeats."""
    memory = backend.device.memory_stats()
    size = max(1, min(COPY_BYTES, memory.free // 8))
    host, pinned = _host_memory(size, backend.device.torch)
    there = torch.empty(size, dtype=torch.uint8, device=backend.device.torch)
    to_device = _seconds(backend, lambda: there.copy_(host))
    to_host = _seconds(backend, lambda: host.copy_(there))
    return Measures(
        host_to_device_gb_per_s=_figure(size / to_device / 1e9),
        device_to_host_gb_per_s=_figure(size / to_host / 1e9),
        copy_bytes=size,
        pinned=pinned,
        launch_us=_figure(_launch(backend) * 1e6),
        memory_free_bytes=memory.free,
        memory_total_bytes=memory.total,
    )


def collective_speed(backend: Backend) -> dict[str, float]:
    """Return the latency of an all_reduce in microseconds, and its bandwidth in 10**9 bytes per second."""
    with backend.translating_errors():
        latency = _all_reduce(backend, SMALL_BYTES, SMALL_REPEATS)
        return {
            "latency_us": round(1e6 * latency, 1),
            "bandwidth_gb_per_s": round(LARGE_BYTES / _all_reduce(backend, LARGE_BYTES, LARGE_REPEATS) / 1e9, 2),
        }


def _all_reduce(backend: Backend, nbytes: int, repeats: int) -> float:
    """Return the median duration of an all_reduce of ``nbytes``. Every rank waits for its result each time."""
    dtype = backend.limits.dtypes[0]
    x = torch.zeros(nbytes // dtype.itemsize // 1024, 1024, dtype=dtype, device=backend.device.torch)
    for _ in range(WARM_RANKS):
        ops.all_reduce(x, backend.mesh.tensor.name)
    return _seconds(backend, lambda: ops.all_reduce(x, backend.mesh.tensor.name), repeats)


def _host_memory(size: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return host memory to copy from, and whether it is page-locked."""
    if device.type != "cpu":
        try:
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True), True
        except (RuntimeError, NotImplementedError):
            pass  # the runtime does not support pinned memory
    return torch.zeros(size, dtype=torch.uint8), False


def _seconds(backend: Backend, run: Callable[[], object], repeats: int = COPIES) -> float:
    """Return the median duration of ``run``, which runs once more before."""
    run()
    taken = []
    for _ in range(repeats):
        backend.device.synchronize()
        start = time.perf_counter()
        run()
        backend.device.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _launch(backend: Backend) -> float:
    number = torch.zeros(1, device=backend.device.torch)
    taken = []
    for index in range(-WARM, LAUNCHES):
        if index % IN_FLIGHT == 0:
            backend.device.synchronize()
        start = time.perf_counter()
        number.add_(1)
        if index >= 0:
            taken.append(time.perf_counter() - start)
    backend.device.synchronize()
    return statistics.median(taken)


def _figure(value: float) -> float:
    return float(f"{value:.3g}")
