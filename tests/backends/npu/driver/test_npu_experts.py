"""Tests for mixtures of experts on the emulated NPU: tokens in every mode and scheme, launches, and captures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hal.backends.npu import emulator
from helpers.npu import compare, processes, schemes
from helpers.thorough import AGAIN, EXHAUSTIVE, MODE, thorough

import hal
from hal.ops.rounding import rms

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = ("bfloat16", "float16", "w8a16", "w8a8", "w8a8_dynamic")
MODES = ("eager", "graph", "piecewise", "npugraph_ex")
BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def made(trained_experts: Path) -> Iterator[dict[str, tuple[Path, str]]]:
    with schemes.checkpoints(trained_experts) as found:
        yield found


@pytest.fixture(scope="module", params=SCHEMES)
def case(request: pytest.FixtureRequest, made: Any) -> compare.Case:
    """Return texts to continue in mixed batches of 1 to 9, and the CPU's results."""
    path, dtype = made[request.param]
    return compare.trained_case(path, dtype, BUCKETS, 16)


@thorough(MODE, r"\[(?!bfloat16-eager|w8a8_dynamic-graph)|\[w8a8_dynamic-graph")
@thorough(
    EXHAUSTIVE,
    r"\[(bfloat16-(graph|piecewise)|float16-(eager|npugraph_ex)|w8a16-(graph|npugraph_ex))|\[(w8a8-(eager|piecewise)|w8a8_dynamic-(eager|npugraph_ex))",
)
@pytest.mark.parametrize("mode", MODES)
def test_the_cpus_tokens(case: compare.Case, mode: str) -> None:
    model, backend = compare.on_npu(case, mode)
    run = compare.run(compare.new_runner(model, backend), case.plan, case.rounded.texts)
    report = compare.compare_routed(run, case)
    assert report.tokens > 1000
    assert report.ties < 0.03 * report.tokens


STEPS = 200


def random_steps(path: Path, dtype: str, steps: int, **config: Any) -> tuple[list[torch.Tensor], list[emulator.Record]]:
    """Run decode steps of random tokens of two sequences. Return the logits and the trace of all but the first step."""
    backend = hal.open({"backend": "npu", "dtype": dtype, "cache": {"num_tokens": 1024}, **config})
    tokens = torch.randint(0, 4096, (steps, 2), generator=torch.Generator().manual_seed(0)).tolist()
    blocks, logits = [[1, 2], [3, 4]], list[torch.Tensor]()
    with hal.Runner(hal.load_model(path, backend), backend) as runner:
        runner.step(runner.batch([[5, 6, 7], [8, 9]], blocks))
        runner.step(runner.batch([[1], [2]], blocks, cached=[3, 2]))
        backend.device.synchronize()
        with emulator.trace() as trace:
            for number, new in enumerate(tokens):
                batch = runner.batch([[each] for each in new], blocks, cached=[4 + number, 3 + number])
                logits.append(runner.step(batch).logits.clone())
            backend.device.synchronize()
        return logits, trace.records


@thorough(MODE, r"\[(bfloat16-nz|w8a8_dynamic-nd)|\[w8a8_dynamic-nz")
@thorough(EXHAUSTIVE, r"\[(bfloat16-nz|w8a8_dynamic-nd)")
@pytest.mark.parametrize("nz", [False, True], ids=["nd", "nz"])
@pytest.mark.parametrize("scheme", ["bfloat16", "w8a8_dynamic"])
def test_one_capture_serves_any_routing_without_the_host(made: Any, scheme: str, nz: bool, trained: Path) -> None:
    """In 200 captured steps of changing routing, nothing is captured, and the host is not waited for.

    The copies are those of a dense model: the batch's.
    """
    graph = {"compilation": {"compiler": "graph", "capture_sizes": [2]}}
    logits, records = random_steps(*made[scheme], STEPS, **graph, options={"nz_weights": nz})
    assert [each for each in records if each.phase == "capture"] == []
    assert sum(each.name == "MoeGatingTopK" for each in records) == 3 * STEPS
    assert sum(each.kind == "graph" for each in records) == STEPS
    _, dense = random_steps(trained, "bfloat16", STEPS // 10, **graph)
    assert copies_of(records) == {key: 10 * count for key, count in copies_of(dense).items()}
    eager, _ = random_steps(*made[scheme], STEPS // 4, options={"nz_weights": nz})
    for one, other in zip(eager, logits, strict=False):
        assert rms((other - one).flatten()) < 0.05 * rms(one.flatten())


def copies_of(records: list[emulator.Record]) -> Counter[tuple[str, int]]:
    """Count copies by name and size."""
    return Counter((each.name, each.bytes) for each in records if each.kind == "copy")


@thorough(AGAIN)
def test_the_launches_of_the_page_are_those_of_the_trace(made: Any) -> None:
    text = (processes.ROOT / "docs" / "reference" / "npu-launches.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w+ \| (?:nd|fractal_nz) \| \d+ \| \d+ \|$", text, re.MULTILINE)
    assert rows == schemes.expert_table(made)
