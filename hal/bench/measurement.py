"""Running a plan: per batch size, every contender made ready, compared, and timed in turns with the probes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch

from hal.bench.bench_environment import environment
from hal.bench.contenders.ours import Ours
from hal.bench.contenders.theirs import Transformers
from hal.bench.contenders.workload import Contender, Inputs, Side
from hal.bench.figures import floor, launches, peak_memory, token_agreement
from hal.bench.figures.timing import Summary, interleave
from hal.bench.plan import Plan, Setting, settle

SIDES: Mapping[str, Callable[[Setting], Side]] = {"hal": Ours, "transformers": Transformers}


@attrs.frozen
class Measurement:
    """A contender at a batch size.

    Attributes:
        contender: its name: the implementation, and its mode.
        batch_size: sequences.
        seconds: of each timed step.
        setup_seconds: what making it ready took, captures, compiling and first step included, loading excluded.
        peak_bytes: what its process's memory grew by at most, weights included; None if that was not asked for or the
            device does not say.
    """

    contender: str
    batch_size: int
    seconds: list[float]
    setup_seconds: float
    peak_bytes: int | None

    @property
    def summary(self) -> Summary:
        """Median and quartiles of the seconds."""
        return Summary.of(self.seconds)


@attrs.frozen
class Floor:
    """The floor at a batch size.

    Attributes:
        batch_size: sequences.
        work: what cannot be avoided.
        probe: what measured the rate.
        probe_amount: bytes or operations of a turn of the probe.
        probe_seconds: of each of its turns.
    """

    batch_size: int
    work: floor.Work
    probe: str
    probe_amount: int
    probe_seconds: list[float]

    @property
    def rate(self) -> float:
        """Bytes or operations a second, by the median turn."""
        return self.probe_amount / Summary.of(self.probe_seconds).median

    @property
    def seconds(self) -> float:
        """What a step would take at that rate."""
        return self.work.total / self.rate


@attrs.frozen
class Result:
    """Everything that a run found.

    ``agreements`` are per batch size, against that batch size's first contender; ``launches`` is empty unless the plan
    says ``trace``.
    """

    plan: Plan
    dtype: str
    weight_bytes: int
    environment: dict[str, Any]
    agreements: dict[int, list[token_agreement.Agreement]]
    measurements: list[Measurement]
    floors: list[Floor]
    launches: list[launches.Launches] = attrs.field(factory=list)


def run(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Result:
    """Measure.

    Args:
        plan: what.
        say: told what is going on.

    Raises:
        HalError: something cannot be done as asked.
        BenchmarkError: contenders disagree.
    """
    with _threads(plan.threads):
        setting = settle(plan)
        where = environment(setting)
        counted = launches.count(setting, say) if plan.trace else []
        say(f"loading {plan.name}")
        sides = {name: SIDES[name](setting) for name in ("hal", *plan.against)}
        device = setting.backend.device
        decode = plan.workload == "decode"
        probe = floor.read_probe(device) if decode else floor.matmul_probe(device, setting.dtype)
        dtype = str(setting.dtype).removeprefix("torch.")
        result = Result(plan, dtype, setting.weight_bytes, where, {}, [], [], counted)
        for size in dict.fromkeys(plan.batch_sizes):
            _measure(setting, sides, probe, size, result, say)
    return result


def _measure(
    setting: Setting,
    sides: Mapping[str, Side],
    probe: floor.Probe,
    size: int,
    result: Result,
    say: Callable[[str], None],
) -> None:
    inputs = Inputs(setting, size)
    if "torch._dynamo" in sys.modules:
        # Else what was compiled for another batch size would make this one compile for sizes that vary.
        torch.compiler.reset()
    with ExitStack() as stack:
        contenders = []
        for name, side in sides.items():
            for mode in side.modes:
                say(f"batch {size}: making {name} {mode} ready")
                contenders.append(side.contender(mode, inputs))
                stack.callback(contenders[-1].close)
        _compare(setting, contenders, probe, size, result, say)


def _compare(
    setting: Setting,
    contenders: Sequence[Contender],
    probe: floor.Probe,
    size: int,
    result: Result,
    say: Callable[[str], None],
) -> None:
    plan = setting.plan
    result.agreements[size] = token_agreement.check(contenders, setting.dtype)
    peaks = {}
    if plan.memory:
        for each in contenders:
            say(f"batch {size}: {each.name} in a process of its own")
            peaks[each.name] = peak_memory.peak(plan, size, each.name)
    say(f"batch {size}: timing")
    seconds = interleave(
        [*contenders, probe.contender],
        plan.repeats,
        warm=plan.workload == "decode",
        synchronize=setting.backend.device.synchronize,
    )
    result.floors.append(
        Floor(size, floor.work(setting, size), probe.description, probe.amount, seconds[probe.contender.name])
    )
    for each in contenders:
        result.measurements.append(
            Measurement(each.name, size, seconds[each.name], each.setup_seconds, peaks.get(each.name))
        )


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
