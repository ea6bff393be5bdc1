"""Tests that the Python of the NPU documentation pages runs. test_npu_schemes.py tests the counts of launches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from helpers.distributions import install
from helpers.npu import processes
from helpers.thorough import PROCESSES, thorough

import hal
from hal.bench.figures import launches

DOCS = processes.ROOT / "docs"
PAGES = [DOCS / "how-to" / "run-on-an-npu.md", DOCS / "tutorials" / "one-model-on-cpu-and-npu.md"]
LAUNCHES = DOCS / "reference" / "npu-launches.md"
FENCE = re.compile(r"^```(python|ini)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (\w+\.py)\n")


@pytest.fixture(autouse=True)
def _back_to_the_cpu() -> Iterator[None]:
    yield
    hal.open("cpu")


@thorough(PROCESSES, r"\[(one-model|run-on-an-npu)")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    """Run the blocks in order in a fresh process. Blocks with modules and entry points are written to files."""
    script = []
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "ini":
            parser = ConfigParser()
            parser.read_string(text)
            groups = parser["options.entry_points"].items()
            install(tmp_path, "toy", "".join(f"[{group}]\n{names}\n" for group, names in groups))
        elif module := MODULE.match(text):
            (tmp_path / module[1]).write_text(text, encoding="utf-8")
        else:
            script.append(text)
    result = processes.python("-c", "\n".join(script), PYTHONPATH=str(tmp_path))
    if page == PAGES[0]:
        assert "<NpuBackend 'npu' on Device('npu:0', 'Ascend910B3 (A2, emulated)')>" in result.stdout
    else:
        first, second = ast.literal_eval(result.stdout)  # The tokens are the CPU's too.
        assert (len(first), len(second)) == (24, 24)


def test_the_peers_figure_is_the_one_in_the_code() -> None:
    (peer,) = launches.PEERS
    assert launches.PEERS[peer] == 10
    name, model, _ = peer.split(", ")
    text = " ".join(LAUNCHES.read_text(encoding="utf-8").split())
    assert f"Ten per layer is what {name} launches for {model} in bfloat16" in text
