"""Running a plan: for each batch size, prepare all contenders, compare their logits, and time them in turns."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import torch

import hal
from hal.bench import floor, peak_memory
from hal.bench.hal_side import HalSide, Launches, count_launches, routings
from hal.bench.llama_side import LlamaSide
from hal.bench.plan import RIVALS, Plan, Setting, prepare
from hal.bench.timing import Agreement, Summary, check, interleave
from hal.bench.transformers_side import TransformersSide
from hal.bench.workload import Contender, Inputs, Side
from hal.config import environment_options
from hal.config.optional_libraries import distribution_of
from hal.device.host_capacity import other_running_threads, usable_cores
from hal.drivers.backend import Backend
from hal.progress import Rounds, Say, going_on, silent, since_start

SIDES: Mapping[str, Callable[[Setting], Side]] = {
    "hal": HalSide,
    "transformers": TransformersSide,
    "llama.cpp": LlamaSide,
}


@attrs.frozen
class Measurement:
    """The times of a contender at a batch size.

    Attributes:
        contender: implementation and mode.
        setup_seconds: duration of preparation, with capture, compilation and the first step, without loading weights.
        peak_bytes: peak growth of its process's memory, with weights; None if not requested or not reported by the
            device.
        fewer_bits: as in :class:`Contender`.
    """

    contender: str
    batch_size: int
    seconds: list[float]
    setup_seconds: float
    peak_bytes: int | None
    fewer_bits: bool = False

    @property
    def summary(self) -> Summary:
        """Return median and quartiles of the durations."""
        return Summary.of(self.seconds)


@attrs.frozen
class Floor:
    """The floor at a batch size.

    Attributes:
        work: unavoidable work of a step.
        probe: description of the probe that measured the rate.
        probe_amount: bytes or operations per turn of the probe.
        probe_seconds: duration of each turn.
        products: the floor of a decode step's products; None if the driver does not know the device's highest rate.
    """

    batch_size: int
    work: floor.Work
    probe: str
    probe_amount: int
    probe_seconds: list[float]
    products: Floor | None = None

    @property
    def rate(self) -> float:
        """Return bytes or operations per second, by the median turn."""
        return self.probe_amount / Summary.of(self.probe_seconds).median

    @property
    def seconds(self) -> float:
        """Return the duration of a step at that rate.

        A decode step reads its weights while it multiplies. Its cache is read by attention, which waits for products.
        """
        return self.work.total / self.rate + self.excess

    @property
    def excess(self) -> float:
        """Return by how much the products take longer than reading their weights; 0 if they do not."""
        return 0.0 if self.products is None else max(0.0, self.products.seconds - self.work.weights / self.rate)


@attrs.frozen
class Result:
    """All results of a run.

    ``agreements`` compares contenders with the first one, by batch size. ``launches`` is empty unless the plan sets
    ``trace``.
    """

    plan: Plan
    dtype: str
    weight_bytes: int
    environment: dict[str, Any]
    agreements: dict[int, list[Agreement]]
    measurements: list[Measurement]
    floors: list[Floor]
    launches: list[Launches] = attrs.field(factory=list)


def run(plan: Plan, say: Say = silent) -> Result:
    """Measure the plan.

    Args:
        say: called with progress messages, also from another thread.

    Raises:
        HalError: the plan cannot be run.
        BenchmarkError: contenders compute different results.
    """
    say = since_start(say)
    with _threads(plan.threads):
        setting = prepare(plan)
        where = environment(setting)
        counted = count_launches(setting, say) if plan.trace else []
        sides = {}
        for name in ("hal", *plan.against):
            with going_on(say, f"loading {plan.name} into {name}"):
                sides[name] = SIDES[name](setting)
        device = setting.backend.device
        decode = plan.workload == "decode"
        probe = floor.read_probe(device) if decode else floor.matmul_probe(device, setting.dtype)
        # All ranks have the same probes, whatever they measure: before each, they wait for each other.
        known = decode and device.multiplying(setting.dtype) is not None
        peak = floor.matmul_probe(device, setting.dtype) if known else None
        dtype = str(setting.dtype).removeprefix("torch.")
        result = Result(plan, dtype, setting.weight_bytes, where, {}, [], [], counted)
        sizes = list(dict.fromkeys(plan.batch_sizes))
        for number, size in enumerate(sizes, 1):
            if len(sizes) > 1:
                say(f"batch {size}: batch size {number} of {len(sizes)}")
            _measure(setting, sides, probe, peak, size, result, say)
    return result


def _measure(
    setting: Setting,
    sides: Mapping[str, Side],
    probe: floor.Probe,
    peak: floor.Probe | None,
    size: int,
    result: Result,
    say: Say,
) -> None:
    ours = sides["hal"]
    inputs = Inputs(setting, size, ours.prefilled(size) if isinstance(ours, HalSide) else ())
    if "torch._dynamo" in sys.modules:
        # Dynamo would otherwise compile the second batch size with dynamic shapes.
        torch.compiler.reset()
    chosen = routings(sides["hal"], inputs)
    with ExitStack() as stack:
        contenders = []
        modes = [(name, side, mode) for name, side in sides.items() for mode in side.modes]
        for number, (name, side, mode) in enumerate(modes, 1):
            with going_on(say, f"batch {size}: preparing {name} {mode}, {number} of {len(modes)}"):
                contenders.append(side.contender(mode, inputs))
            stack.callback(contenders[-1].close)
        loaded = ours.model if isinstance(ours, HalSide) else None
        probes = [(probe, floor.work(setting, size, chosen, loaded))]
        if peak is not None and (products := floor.decode_products(setting.meta, size, chosen)).total:
            probes.append((peak, products))
        _compare(setting, contenders, probes, size, result, say)


def _compare(
    setting: Setting,
    contenders: Sequence[Contender],
    probes: Sequence[tuple[floor.Probe, floor.Work]],
    size: int,
    result: Result,
    say: Say,
) -> None:
    plan = setting.plan
    with going_on(say, f"batch {size}: checking that all compute the same"):
        result.agreements[size] = check(contenders, setting.dtype)
    peaks = {}
    if plan.memory:
        for each in contenders:
            with going_on(say, f"batch {size}: measuring the memory of {each.name} in a separate process"):
                peaks[each.name] = peak_memory.peak(plan, size, each.name)
    say(f"batch {size}: timing, {plan.repeats} rounds")
    seconds = interleave(
        [*contenders, *(probe.contender for probe, _ in probes)],
        plan.repeats,
        warm=plan.workload == "decode",
        synchronize=setting.backend.device.synchronize,
        meet=lambda: _meet(setting.backend),
        ended=Rounds(say, f"batch {size}: timing", plan.repeats).ended,
    )
    found, *products = (
        Floor(size, work, probe.description, probe.amount, seconds[probe.contender.name]) for probe, work in probes
    )
    result.floors.append(attrs.evolve(found, products=products[0] if products else None))
    for each in contenders:
        result.measurements.append(
            Measurement(each.name, size, seconds[each.name], each.setup_seconds, peaks.get(each.name), each.fewer_bits)
        )


def _meet(backend: Backend) -> None:
    """Wait until all ranks come here."""
    if backend.mesh.size > 1:
        backend.ops.all_reduce(
            torch.ones(1, dtype=backend.limits.dtypes[0], device=backend.device.torch), backend.mesh.tensor.name
        )


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment(setting: Setting) -> dict[str, Any]:
    """Return the machine, the threads, the versions of libraries, and the environment variables that configure hal."""
    libraries = ("torch-hal", "torch", *(distribution_of(RIVALS[name][0]) for name in setting.plan.against))
    return {
        "device": setting.backend.device.name,
        "backend": setting.backend.name,
        "emulated": _emulated(setting),
        "kernels": dict(setting.backend.sources),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": setting.plan.threads or torch.get_num_threads(),
        "other_threads": other_running_threads(),
        "platform": platform.platform(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HAL_")},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in libraries}},
    }


def _emulated(setting: Setting) -> bool:
    """Return whether the driver's option ``emulator`` is set."""
    options = {**environment_options(setting.backend.name), **setting.backend.config.options}
    return options.get("emulator") not in (None, False, 0, "", "off")


def _version(library: str) -> str:
    if library == "torch":
        return torch.__version__  # with the build, such as +cpu
    return hal.__version__ if library == "torch-hal" else importlib.metadata.version(library)


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
