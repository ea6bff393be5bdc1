"""Tests for quantized models and mixtures of experts on the emulated NPU: tokens in every mode, launches, captures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated_cann
import pytest
import torch
from helpers.npu import compare, processes, schemes
from helpers.thorough import EXHAUSTIVE, MODE, thorough

import hal
from hal.ops.rounding import rms

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = processes.ROOT / "docs" / "reference" / "npu-launches.md"
SEQUENCES, WINDOW = 3, 40
MODES = ("eager", "graph", "piecewise", "piecewise_eager", "npugraph_ex")
CASES = [("dense", scheme) for scheme in ("bfloat16", "w8a8", "w8a8_dynamic")]
CASES += [("experts", scheme) for scheme in ("bfloat16", "float16", "w8a16", "w8a8", "w8a8_dynamic")]
RUN = (
    *("dense-w8a8_dynamic-graph", "dense-bfloat16-piecewise_eager", "dense-w8a8-graph", "dense-w8a8-npugraph_ex"),
    *("dense-w8a8_dynamic-piecewise", "experts-bfloat16-eager", "experts-float16-graph", "experts-w8a16-piecewise"),
    *("experts-w8a8-graph", "experts-w8a8_dynamic-npugraph_ex"),
)
"""Each scheme, each mode, and each way to round inputs, with the compilers that fuse it. `make test` runs the first."""


@pytest.fixture(scope="module")
def made(trained: Path, trained_experts: Path) -> Iterator[dict[str, schemes.Made]]:
    with schemes.checkpoints(trained) as dense, schemes.checkpoints(trained_experts) as experts:
        yield {"dense": dense, "experts": experts}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, made: Any) -> tuple[str, compare.Case]:
    """Return texts to continue in mixed batches of 1 to 5, and the CPU's results."""
    model, scheme = request.param
    return model, compare.trained_case(*made[model][scheme], (2, 4), 8)


@thorough(MODE, rf"\[(?!{RUN[0]}|experts-bfloat16-eager)")
@thorough(EXHAUSTIVE, rf"\[(?!({'|'.join(RUN)})\])")
@pytest.mark.parametrize("mode", MODES)
def test_the_cpus_tokens(case: tuple[str, compare.Case], mode: str) -> None:
    """Logits are as close to float32 as the CPU's, and greedy tokens are the CPU's, except at ties."""
    name, of = case
    model, backend = compare.on_npu(of, mode)
    found = compare.run(compare.new_runner(model, backend), of.plan, of.rounded.texts)
    report = (compare.compare_routed if name == "experts" else compare.compare)(found, of)
    assert report.tokens > 500
    assert report.ties < 0.03 * report.tokens  # also within prompts, where next tokens are less certain


@thorough(MODE, r"\[(bfloat16|w8a8)(-(?!graph)\w+)?\]")
@pytest.mark.parametrize("int8", ["w8a8", "w8a8_dynamic"])
def test_only_the_quantising_fusions_round_otherwise(made: Any, int8: str, trained: Path) -> None:
    """The fused kernels skip the rounding to bfloat16 between the norm or activation and the integers.

    All else equals eager at a captured size, where nothing is padded: padding changes the rounding of the logits.
    """
    sequences, stream = 2, schemes.held_out.tokens(hal.Checkpoint.open(trained), SEQUENCES * WINDOW + 1)
    path, dtype = made["dense"][int8]
    passes = {name: False for name in hal.open("npu").pass_names if name.endswith("quantize")}
    assert len(passes) == 4
    on = schemes.runner(path, dtype, "npu", "graph", SEQUENCES, WINDOW, passes=passes)
    assert sequences in on.backend.config.compilation.capture_sizes
    found = schemes.held_out.decoded_perplexity(on, stream, sequences, WINDOW)
    eager = schemes.runner(path, dtype, "npu", "eager", SEQUENCES, WINDOW)
    assert found == schemes.held_out.decoded_perplexity(eager, stream, sequences, WINDOW)


STEPS = 40


def random_steps(
    path: Path, dtype: str, steps: int, **config: Any
) -> tuple[list[torch.Tensor], list[emulated_cann.Record]]:
    """Run decode steps of random tokens of two sequences. Return the logits and the trace of all but the first step."""
    backend = hal.open({"backend": "npu", "dtype": dtype, "cache": {"num_tokens": 1024}, **config})
    tokens = torch.randint(0, 4096, (steps, 2), generator=torch.Generator().manual_seed(0)).tolist()
    blocks, logits = [[1, 2], [3, 4]], list[torch.Tensor]()
    with hal.Runner(hal.load_model(path, backend), backend) as runner:
        runner.step(runner.batch([[5, 6, 7], [8, 9]], blocks))
        runner.step(runner.batch([[1], [2]], blocks, cached=[3, 2]))
        backend.device.synchronize()
        with emulated_cann.trace() as trace:
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
    """In captured steps of changing routing, nothing is captured, and the host is not waited for.

    The copies are those of a dense model: the batch's.
    """
    graph = {"compilation": {"compiler": "graph", "capture_sizes": [2]}}
    logits, records = random_steps(*made["experts"][scheme], STEPS, **graph, options={"nz_weights": nz})
    assert [each for each in records if each.phase == "capture"] == []
    assert sum(each.name == "MoeGatingTopK" for each in records) == STEPS  # The second of two layers has experts.
    assert sum(each.kind == "graph" for each in records) == STEPS
    _, dense = random_steps(trained, "bfloat16", STEPS // 4, **graph)
    assert copies_of(records) == {key: 4 * count for key, count in copies_of(dense).items()}
    eager, _ = random_steps(*made["experts"][scheme], STEPS // 4, options={"nz_weights": nz})
    for one, other in zip(eager, logits, strict=False):
        assert rms((other - one).flatten()) < 0.05 * rms(one.flatten())


def copies_of(records: list[emulated_cann.Record]) -> Counter[tuple[str, int]]:
    """Count copies by name and size."""
    return Counter((each.name, each.bytes) for each in records if each.kind == "copy")


@thorough(EXHAUSTIVE)
def test_the_launches_of_the_page_are_those_of_the_trace(made: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for pattern, expected in (
        (r"\w[\w, ]+ \| \w+ \| \d+ \| \w+ \| \d+ \| \d+", schemes.launch_table(made["dense"])),
        (r"[a-z]+ \| \d+ \| \d+", schemes.prefill_table(made["dense"].source)),
        (r"\w+ \| (?:nd|fractal_nz) \| \d+ \| \d+", schemes.expert_table(made["experts"])),
    ):
        assert re.findall(rf"^\| {pattern} \|$", text, re.MULTILINE) == expected
