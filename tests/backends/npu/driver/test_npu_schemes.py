"""Tests for every mode in bfloat16 and in int8: against the CPU, and against eager steps on held-out text.

schemes.py prints the latter comparison in more detail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.npu import compare, processes, schemes
from helpers.thorough import AGAIN, EXHAUSTIVE, MODE, thorough

import hal

pytestmark = pytest.mark.usefixtures("one_thread")

SEQUENCES, WINDOW = 3, 40
MODES = ("graph", "piecewise", "piecewise_eager", "npugraph_ex")
BUCKETS = (1, 2, 4, 8)


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, tuple[Path, str]]]:
    with schemes.checkpoints(further=schemes.WEIGHT_ONLY) as found:
        yield found


@pytest.fixture(scope="module")
def stream(trained: Path) -> list[int]:
    return schemes.held_out.tokens(hal.Checkpoint.open(trained), SEQUENCES * WINDOW + 1)


@pytest.fixture(scope="module", params=["bfloat16", "w8a8", "w8a8_dynamic"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def case(made: Any, scheme: str) -> compare.Case:
    """Return texts to continue in mixed batches of 1 to 9, and the CPU's results."""
    path, dtype = made[scheme]
    return compare.trained_case(path, dtype, BUCKETS, 16)


@thorough(
    MODE,
    r"\[(bfloat16|w8a8)(-(?!graph)\w+)?\]|\[w8a8_dynamic-piecewise_eager|\[(w8a8_dynamic-piecewise|bfloat16-graph)|\[(w8a8_dynamic-npugraph_ex|w8a8-graph)|\[w8a8_dynamic-(eager|piecewise)",
)
@thorough(EXHAUSTIVE, r"\[(bfloat16-(eager|piecewise|npugraph_ex)|w8a8-(eager|piecewise|piecewise_eager))\]")
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_the_cpus_tokens(case: compare.Case, mode: str) -> None:
    """Logits of prefill and decode are as close to float32 as the CPU's.

    Greedy tokens are the CPU's, except at ties.
    """
    model, backend = compare.on_npu(case, mode)
    report = compare.compare(compare.run(compare.new_runner(model, backend), case.plan, case.rounded.texts), case)
    assert report.tokens > 1000
    assert report.ties < 0.03 * report.tokens  # also within prompts, where next tokens are less certain


@thorough(MODE, r"\[(bfloat16|w8a8)(-(?!graph)\w+)?\]")
@pytest.mark.parametrize("int8", ["w8a8", "w8a8_dynamic"])
def test_only_the_quantising_fusions_round_otherwise(made: Any, int8: str, stream: list[int]) -> None:
    """The fused kernels skip the rounding to bfloat16 between the norm or activation and the integers.

    All else equals eager at a captured size, where nothing is padded: padding changes the rounding of the logits.
    """
    sequences = 2
    path, dtype = made[int8]
    passes = {name: False for name in hal.open("npu").pass_names if name.endswith("quantize")}
    assert len(passes) == 4
    on = schemes.runner(path, dtype, "npu", "graph", SEQUENCES, WINDOW, passes=passes)
    assert sequences in on.backend.config.compilation.capture_sizes
    found = schemes.held_out.decoded_perplexity(on, stream, sequences, WINDOW)
    eager = schemes.runner(path, dtype, "npu", "eager", SEQUENCES, WINDOW)
    assert found == schemes.held_out.decoded_perplexity(eager, stream, sequences, WINDOW)


@thorough(AGAIN)
def test_the_launches_of_the_page_are_those_of_the_trace(made: Any) -> None:
    text = (processes.ROOT / "docs" / "reference" / "npu-launches.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w[\w, ]+ \| \w+ \| \d+ \| \w+ \| \d+ \| \d+ \|$", text, re.MULTILINE)
    assert rows == schemes.launch_table(made)
    prefills = re.findall(r"^\| [a-z]+ \| \d+ \| \d+ \|$", text, re.MULTILINE)
    assert prefills == schemes.prefill_table(schemes.TRAINED)
