"""What docs/npu.md says is true: its Python runs, as a new user's would. test_schemes.py counts its launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from helpers.npu import processes

import hal
from hal.bench.figures import launches

PAGE = processes.ROOT / "docs" / "npu.md"
FENCE = re.compile(r"^```(python|ini)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (\w+\.py)\n")


@pytest.fixture(autouse=True)
def _back_to_the_cpu() -> Iterator[None]:
    yield
    hal.open("cpu")


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    """In order, in a process that nothing was prepared for; modules and entry points are laid out as such."""
    script = []
    for language, text in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if language == "ini":
            parser = ConfigParser()
            parser.read_string(text)
            metadata = tmp_path / "toy-1.0.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
            groups = parser["options.entry_points"].items()
            (metadata / "entry_points.txt").write_text("".join(f"[{group}]\n{names}\n" for group, names in groups))
        elif module := MODULE.match(text):
            (tmp_path / module[1]).write_text(text, encoding="utf-8")
        else:
            script.append(text)
    result = processes.python("-c", "\n".join(script), PYTHONPATH=str(tmp_path))
    assert "<NpuBackend 'npu' on Device('npu:0', 'Ascend910B3 (A2, emulated)')>" in result.stdout


def test_the_peers_figure_is_the_one_in_the_code() -> None:
    (peer,) = launches.PEERS
    assert launches.PEERS[peer] == 10
    name, model, _ = peer.split(", ")
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"Ten per layer is what {name} launches for {model} in bfloat16" in text
