"""Tests of the programs that an installed CANN and its driver bring along: what engines run and parse of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from emulated_cann import activation
from support.children import emulate

HOME = Path(os.environ["ASCEND_HOME_PATH"])


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def properties(*arguments: str, soc: str = "Ascend910B3") -> Mapping[str, str]:
    """Return what a query of npu-smi prints, as programs read it: the text before and after a colon."""
    found = run("npu-smi", "info", *arguments, EMULATED_CANN_OPTIONS=f'{{"devices": 2, "soc": "{soc}"}}')
    assert found.returncode == 0, found.stderr
    return dict((part.strip() for part in line.split(":")) for line in found.stdout.splitlines() if ":" in line)


@pytest.mark.parametrize(
    ("soc", "names"),
    [
        ("Ascend910B3", {"Chip Type": "Ascend", "Chip Name": "910B3"}),
        ("Ascend910_9391", {"Chip Name": "Ascend910", "NPU Name": "9391"}),
    ],
)
def test_the_board_names_the_soc(soc: str, names: Mapping[str, str]) -> None:
    board = properties("-t", "board", "-i", "1", "-c", "0", soc=soc)
    assert names.items() <= board.items()
    assert ("Chip Type" in board) == ("Chip Type" in names)
    assert "Chip Name" not in properties("-t", "board", "-i", "1", soc=soc)


def test_tables_of_npu_smi() -> None:
    assert properties("-l")["Total Count"] == "2"
    assert properties("-t", "usages", "-i", "0")["HBM Capacity(MB)"] == "16384"
    assert properties("-i", "0", "-t", "health")["Health"] == "OK"
    header, *rows = run("npu-smi", "info", "-m").stdout.splitlines()
    assert re.split(r"\s{2,}", header) == ["NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"]
    assert [row.split() for row in rows] == [[str(each), "0", str(each), "Ascend910B3"] for each in range(2)]
    overview = run("npu-smi", "info").stdout.splitlines()
    assert len(set(map(len, overview))) == 1
    assert [row.split()[2] for row in overview if re.match(r"\| \d+ +\w", row)] == ["910B3", "910B3"]
    topology = run("npu-smi", "info", "-t", "topo").stdout.splitlines()
    assert topology[1].split()[:3] == ["NPU0", "X", "HCCS"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("npu-smi info -t power", "emulated are info"),
        ("npu-smi set -t reset", "emulated are info"),
        ("npu-smi info -t board -i 2", "invalid choice: 2"),
        ("msprof --application=true", "no profiler; `emulated-cann run --trace FILE`"),
        ("bisheng kernel.ll", "TRITON_INTERPRET=1"),
    ],
)
def test_what_is_not_emulated_is_refused_in_words(command: str, reason: str) -> None:
    found = run(*command.split())
    assert found.returncode == 1
    assert reason in found.stderr


def test_triton_finds_the_compiler() -> None:
    assert "hiipu64" in run("bisheng", "-print-targets").stdout.split()
    assert (HOME / "include" / "runtime" / "runtime" / "rt.h").is_file()


def test_the_environment_of_set_env(clean: dict[str, str]) -> None:
    """A program that `emulated-cann run` starts, and this process, which activate() prepared, have the same."""
    names = (*activation.HOMES, *activation.PATHS, "ASCEND_OPP_PATH", "LD_LIBRARY_PATH")
    script = f"import os\nprint([os.environ[name] for name in {names}])"
    found = emulate("--devices", "2", "--", sys.executable, "-c", script, environ=clean)
    assert found.stdout.strip() == str([os.environ[name] for name in names]), found.stderr
    assert os.environ["ASCEND_OPP_PATH"] == str(HOME / "opp")
    assert os.environ["PATH"].startswith(f"{HOME}/bin:{HOME}/tools/bisheng_compiler/bin:")
