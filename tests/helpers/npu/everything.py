"""Every comparison of models on the npu backend with the cpu backend; test_npu_models.py selects from these.

    python tests/helpers/npu/everything.py
    python tests/helpers/npu/everything.py --configurations 5 --seeds 2 --queue 1

For each family some random configurations, and the trained checkpoint, in float16 and bfloat16, eager and as graphs,
with torch_npu's task queue off and on: logits and greedy choices against the CPU's, over batches of the size of every
bucket, the sizes next to it, and more. Then parts of the same under each schedule seed of the emulated CANN, whose
logits must equal those without a seed bit for bit; random configurations alternate between task queue off and on.

Prints a line for each checkpoint and a summary, and exits with 1 if anything differs by more than rounding. Takes about
a quarter of an hour on one core. Needs the package installed with its extra ``test``, and no NPU.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TESTS))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported after its CANN is loaded.

import attrs  # noqa: E402
import click  # noqa: E402

TRAINED = TESTS.parent / "checkpoints" / "tiny-python"


@attrs.define
class Summary:
    """Counts, and the worst of the ratios that :mod:`compare` bounds."""

    checkpoints: int = 0
    runs: int = 0
    seeded: int = 0
    tokens: int = 0
    ties: int = 0
    texts: int = 0
    mean: float = 0.0
    worst: float = 0.0
    failures: int = 0

    def add(self, other: Summary) -> None:
        """Add the counts of another summary."""
        for name, value in attrs.asdict(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if isinstance(value, float) else mine + value)

    def __str__(self) -> str:
        return (
            f"{self.checkpoints} checkpoints, {self.runs} runs, {self.tokens} tokens, worst ratio {self.worst:.2f}, "
            f"mean {self.mean:.3f}, {self.ties} ties among their greedy choices, {self.texts} texts, "
            f"{self.seeded} runs under seeds, {self.failures} failures"
        )


@attrs.frozen
class Chosen:
    """The command-line options."""

    configurations: int
    seeds: int
    calls: int
    queues: tuple[str, ...]
    dtypes: tuple[str, ...]
    trained: bool

    def seeds_of(self, number: int | None, queue: str) -> list[int]:
        """Return the schedule seeds of a configuration or of the trained checkpoint, with the task queue off or on."""
        seeds = range(self.seeds)
        if number is None or len(self.queues) == 1:
            return list(seeds)
        return [seed for seed in seeds if (seed + number) % 2 == int(queue)]


def check(case: Any, chosen: Chosen, seeds: list[int], name: str, *, generate: bool = False) -> Summary:
    """Check one checkpoint in one dtype, in both modes."""
    from hal.backends.npu import emulator

    from helpers.npu import compare

    summary = Summary(checkpoints=1)

    def failed(what: str, error: Exception) -> None:
        summary.failures += 1
        click.echo(f"FAILED {name} {what}: {type(error).__name__}: {error}")

    for mode in compare.MODES:
        try:
            model, backend = compare.on_npu(case, mode)
            runner = compare.new_runner(model, backend)
            free = compare.run(runner, case.plan, case.rounded.texts)
            summary.runs += 1
            report = compare.compare(free, case)
            summary.add(Summary(**attrs.asdict(report)))
            if generate:
                compare.same_text(runner, case)
                summary.texts += len(case.plan.prompts)
        except Exception as error:
            failed(mode, error)
            continue
        for seed in seeds:
            try:
                with emulator.schedule(seed):
                    runner = compare.new_runner(model, backend)
                    ours = compare.run(runner, case.plan.first(chosen.calls), case.rounded.texts)
                summary.seeded += 1
                compare.same_bits(ours, free)
            except Exception as error:
                failed(f"{mode}, schedule seed {seed}", error)
    return summary


def work(chosen: Chosen, queue: str) -> Summary:
    """Run all comparisons in this process, with its setting of the task queue."""
    from hal.backends.npu import emulator

    emulator.activate()
    import torch
    from hal.backends.npu.soc import CAPTURE_SIZES

    from helpers.npu import compare

    torch.set_num_threads(1)
    logging.getLogger("hal").setLevel(logging.ERROR)
    total = Summary()

    def trained(dtype: str) -> Iterator[tuple[str, Summary]]:
        case = compare.trained_case(TRAINED, dtype, (1, 2, 4, 8), 16)
        seeds = chosen.seeds_of(None, queue)
        yield f"trained {dtype}", check(case, chosen, seeds, f"trained {dtype}", generate=True)
        case = compare.trained_case(TRAINED, dtype, CAPTURE_SIZES, CAPTURE_SIZES[-1] + 6)
        case = attrs.evolve(case, buckets=None)
        yield f"trained {dtype}, all buckets", check(case, chosen, [], f"trained {dtype}, all buckets")

    def drawn(dtype: str) -> Iterator[tuple[str, Summary]]:
        for family in compare.FAMILIES:
            for number in range(chosen.configurations):
                name = f"{family} {number} {dtype}"
                with tempfile.TemporaryDirectory() as folder:
                    case = compare.random_case(family, number, dtype, Path(folder))
                    yield name, check(case, chosen, chosen.seeds_of(number, queue), name)

    for dtype in chosen.dtypes:
        for part in (trained, drawn) if chosen.trained else (drawn,):
            began = time.perf_counter()
            for name, summary in part(dtype):
                click.echo(f"{name}, task queue {queue}, {time.perf_counter() - began:.1f} s: {summary}")
                total.add(summary)
                gc.collect()
                began = time.perf_counter()
    return total


@click.command(help=str(__doc__).split("\n", maxsplit=1)[0])
@click.option("--configurations", default=20, show_default=True, help="Random configurations of each family.")
@click.option("--seeds", default=20, show_default=True, help="Schedule seeds.")
@click.option("--calls", default=40, show_default=True, help="Steps of each run under a schedule seed.")
@click.option(
    "--queue",
    "queues",
    type=click.Choice(["0", "1"]),
    multiple=True,
    default=("0", "1"),
    show_default=True,
    help="TASK_QUEUE_ENABLE; can be repeated.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["float16", "bfloat16"]),
    multiple=True,
    default=("float16", "bfloat16"),
    show_default=True,
    help="Can be repeated.",
)
@click.option("--trained/--no-trained", default=True, show_default=True, help="Include the trained checkpoint.")
@click.option("--summary", "file", type=click.Path(path_type=Path), hidden=True)
def main(
    configurations: int,
    seeds: int,
    calls: int,
    queues: tuple[str, ...],
    dtypes: tuple[str, ...],
    trained: bool,
    file: Path | None,
) -> None:
    chosen = Chosen(configurations, seeds, calls, queues, dtypes, trained)
    if file is not None:  # a subprocess of the call below
        file.write_text(json.dumps(attrs.asdict(work(chosen, os.environ["TASK_QUEUE_ENABLE"]))))
        return
    total, began = Summary(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for queue in queues:
            file = Path(folder) / f"{queue}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--summary", str(file)]
            status = subprocess.run(command, env={**os.environ, "TASK_QUEUE_ENABLE": queue}, check=False).returncode
            if status or not file.exists():
                total.failures += 1
                click.echo(f"FAILED: the process with task queue {queue} ended with {status}")
            else:
                total.add(Summary(**json.loads(file.read_text())))
    click.echo(f"{total}; {time.perf_counter() - began:.0f} s")
    sys.exit(1 if total.failures else 0)


if __name__ == "__main__":
    main()
