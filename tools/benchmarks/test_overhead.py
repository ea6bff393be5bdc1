"""Benchmarks the overhead of hal: a call, an import, opening, a step's Python code, and memory during loading."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import large_checkpoint
from pytest_benchmark.fixture import BenchmarkFixture

import hal
from hal import ops
from hal.device.host_device import HostDevice
from hal.ops import Operation
from hal.step import Bounds, InputBatch

from .measuring import report

LAYERS = 28


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of 28 layers so narrow that most of a step is Python."""
    folder = tmp_path_factory.mktemp("deep")
    large_checkpoint.write(
        folder,
        torch.float32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=128,
    )
    return folder


def nanoseconds_per_call(function: Callable[..., Any], arguments: tuple[Any, ...], count: int = 200_000) -> float:
    start = time.perf_counter_ns()
    for _ in range(count):
        function(*arguments)
    return (time.perf_counter_ns() - start) / count


def test_an_operation_call(benchmark: BenchmarkFixture) -> None:
    """Compare hal.ops.rms_norm with the driver's function, alternating; the kernel does nothing."""

    def kernel(x: Any, weight: Any, eps: float) -> None:
        return None

    cpu = hal.open("cpu")
    hal.Backend("bare", cpu.device, kernels={"rms_norm": kernel}).activate()
    arguments = (torch.ones(1), torch.ones(1), 1e-6)
    pairs = [
        (nanoseconds_per_call(kernel, arguments), nanoseconds_per_call(ops.rms_norm, arguments)) for _ in range(15)
    ]
    benchmark.pedantic(ops.rms_norm, arguments, rounds=50, iterations=10_000)
    cpu.activate()
    report(
        benchmark,
        kernel_ns=round(statistics.median(direct for direct, _ in pairs), 1),
        added_ns=round(statistics.median(through - direct for direct, through in pairs), 1),
        added_ns_of_fastest=round(min(t for _, t in pairs) - min(d for d, _ in pairs), 1),
    )


def milliseconds_of(program: str) -> float:
    """Run a program that prints seconds in a fresh interpreter with cached bytecode; return milliseconds."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "hal-benchmark-bytecode")
    command = [sys.executable, "-P", "-c", program]  # A console script does not have the current folder on the path.
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return float(result.stdout) * 1e3


TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


HELP = "import subprocess, sys; " + TIMED.format("subprocess.check_output([sys.executable, '-m', 'hal', '--help'])")


def test_import(benchmark: BenchmarkFixture) -> None:
    """Measure `import torch`, `import hal`, and the process `hal --help`, alternating."""
    programs = [TIMED.format("import torch"), TIMED.format("import hal"), HELP]
    runs = [[milliseconds_of(program) for program in programs] for _ in range(10)][1:]  # the first writes the bytecode
    benchmark.pedantic(milliseconds_of, (programs[1],), rounds=3)
    torch_ms, hal_ms, help_ms = (round(statistics.median(times)) for times in zip(*runs, strict=True))
    report(benchmark, torch_ms=torch_ms, hal_ms=hal_ms, help_ms=help_ms)


def test_opening_the_cpu_backend(benchmark: BenchmarkFixture) -> None:
    """Measure the first `hal.open("cpu")` of a process, including imports, and a later one.

    After the import of torch, Python is about to run a full garbage collection, which then falls into whatever runs
    next. So the first open is measured with and without the garbage collector.
    """
    program = TIMED.format("hal.open('cpu')")
    milliseconds_of("import hal, torch; " + program)  # writes the bytecode
    pairs = [
        (
            milliseconds_of(f"import hal, torch, gc; gc.disable(); {program}"),
            milliseconds_of(f"import hal, torch; {program}"),
        )
        for _ in range(7)
    ]
    benchmark.pedantic(hal.open, ("cpu",), rounds=20)
    report(
        benchmark,
        first_ms=round(statistics.median(without for without, _ in pairs), 1),
        first_with_collection_ms=round(statistics.median(with_ for _, with_ in pairs), 1),
    )


@pytest.mark.parametrize("compiler", ["eager", "graph"])
def test_the_python_of_a_decode_step(benchmark: BenchmarkFixture, deep: Path, compiler: str) -> None:
    """A decode step of 28 narrow layers, and its time outside operations (graph: outside the tape)."""
    backend = hal.open({"backend": "cpu", "compilation": {"compiler": compiler, "capture_sizes": [1]}})
    runner = hal.Runner(hal.load_model(deep, backend), backend)
    batch = runner.batch([[5]], [[1]], cached=[10])
    spent = [0.0]

    def timed(operation: Operation, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return kernel(*args)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    def step_outside() -> float:
        spent[0] = 0.0
        start = time.perf_counter()
        runner.step(batch)
        return time.perf_counter() - start - spent[0]

    if compiler == "eager":
        with ops.intercepted(timed):
            outside = statistics.median(step_outside() for _ in range(200))
    else:
        form: Any = runner.forms["decode"]
        graph = form.bucket_for(batch.shape).graphs[0]
        launch = graph._launch

        def timed_launch(values: Any) -> None:
            start = time.perf_counter()
            launch(values)
            spent[0] += time.perf_counter() - start

        graph._launch = timed_launch
        outside = statistics.median(step_outside() for _ in range(200))
        graph._launch = launch
    benchmark.pedantic(runner.step, (batch,), rounds=200, warmup_rounds=10)
    report(benchmark, outside_ms=round(outside * 1e3, 3), layers=LAYERS)


PEAK = """
import sys, hal, torch, hal.models.qwen3, hal.checkpoint.loading
backend = hal.open("cpu")
before = backend.device.memory_stats().allocated
model = hal.load_model(sys.argv[1], backend)
print(backend.device.memory_stats().peak - before)
"""


def test_memory_while_loading(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Measure the growth of a process's peak resident memory during loading, relative to the bytes of the weights."""
    weights = large_checkpoint.write(tmp_path, num_hidden_layers=24)

    def load() -> int:
        command = [sys.executable, "-c", PEAK, str(tmp_path)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    peak = benchmark.pedantic(load, rounds=3)
    report(benchmark, weights_mb=round(weights / 1e6), peak_over_weights=round(peak / weights, 3))


def test_the_batch_of_a_decode_step(benchmark: BenchmarkFixture) -> None:
    """Make the batch of 32 sequences of 4,000 tokens: from lists, and from rows that persist. In milliseconds."""
    size, length, block = 32, 4000, 64
    bounds = Bounds(32_000, 1, 4000, 8192)
    blocks = [list(range(1 + 100 * row, 64 + 100 * row)) for row in range(size)]
    inputs = InputBatch(
        hal.step.Batch, max_sequences=64, max_length=8192, block_size=block, device=HostDevice(), bounds=bounds
    )
    for row in range(size):
        inputs.add([7] * length, blocks[row], cached=length - 1)
    every, cached = list(range(size)), [length - 1] * size

    def milliseconds(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return round(statistics.median(times) * 1e3, 3)

    def build() -> hal.step.Batch:
        return hal.step.Batch.build([[7]] * size, blocks, block_size=block, cached=cached, bounds=bounds)

    report(
        benchmark,
        of_lists=milliseconds(build),
        of_rows=milliseconds(inputs.batch),
        of_named_rows=milliseconds(lambda: inputs.batch(rows=every)),
    )
    benchmark(inputs.batch)
