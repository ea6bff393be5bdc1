"""Tests that the Python of the guide to NPUs runs. test_npu_schemes.py tests the counts of launches."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from helpers.npu import processes
from helpers.thorough import PROCESSES, thorough

import hal
from hal.bench.hal_side import PEERS

DOCS = processes.ROOT / "docs"
PAGE = DOCS / "how-to" / "run-on-an-npu.md"
LAUNCHES = DOCS / "reference" / "npu-launches.md"


@pytest.fixture(autouse=True)
def _back_to_the_cpu() -> Iterator[None]:
    yield
    hal.open("cpu")


@thorough(PROCESSES)
def test_the_python_of_the_page_runs() -> None:
    """Run the blocks in order in a fresh process."""
    script = "\n".join(
        re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    result = processes.python("-c", script)
    assert "<NpuBackend 'npu' on Device('npu:0', 'Ascend910B3 (A2, emulated)')>" in result.stdout


def test_the_peers_figure_is_the_one_in_the_code() -> None:
    (peer,) = PEERS
    assert PEERS[peer] == 10
    name, model, _ = peer.split(", ")
    text = " ".join(LAUNCHES.read_text(encoding="utf-8").split())
    assert f"Ten per layer is what {name} launches for {model} in bfloat16" in text
