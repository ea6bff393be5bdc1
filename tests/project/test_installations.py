"""Tests that a checkout works in each way to install it: in its root, whose `hal` Python finds first, and elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import clones
from helpers.clones import Clone
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough


@pytest.fixture(scope="module", params=clones.WAYS)
def clone(request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return clones.clone(repository, tmp_path_factory.mktemp(request.param), request.param)


OPENED = (
    "import hal, hal.backends.cpu as cpu, hal.models as models; hal.open('cpu'); "
    "print(hal.__file__, cpu.__file__, models.__file__)"
)


@thorough(EXHAUSTIVE, r"\[editable")
@thorough(PROCESSES, r"\[(editable|wheel)\]")
def test_all_of_hal_comes_from_one_place(clone: Clone, tmp_path: Path) -> None:
    for folder in (clone.root, tmp_path):
        hal, cpu, models = map(Path, clone.check(folder, "python", "-c", OPENED).split())
        home = hal.parent if hal.is_relative_to(clone.home) else hal.parents[1]
        assert (cpu, models) == (home / "backends" / "cpu" / "__init__.py", home / "models" / "__init__.py")
        assert folder == tmp_path or hal.is_relative_to(clone.root), "Python searches the current folder first"


@thorough(EXHAUSTIVE, r"\[(editable|wheel)")
@thorough(PROCESSES)
def test_commands_with_child_processes(clone: Clone, tmp_path: Path) -> None:
    """Ranks are Python with -m, and search the current folder first."""
    checkpoint = str(clone.root / "checkpoints" / "tiny-python")
    generate = ("generate", checkpoint, "--prompt", "import", "--max-new-tokens", "2")
    folders = (clone.root, tmp_path)
    assert len({clone.check(folder, "hal", *generate, "--tensor-parallel", "2") for folder in folders}) == 1
    commands = (("hal",), ("python", "-m", "hal"))
    shown = {clone.check(folder, *command, "backends") for command, folder in zip(commands, folders, strict=True)}
    assert len(shown) == 1


@thorough(EXHAUSTIVE, r"\[(editable|folder)")
@thorough(PROCESSES)
def test_ranks_import_the_hal_of_the_command(clone: Clone, tmp_path: Path) -> None:
    """An installed hal may be older than the checkout in which its command is called."""
    program = "import sys, hal; sys.stdout.write(hal.__file__ + chr(10)); sys.stdout.flush()"
    ranks = f"from hal.parallel.launch import run_ranks; assert run_ranks(['-c', {program!r}], 2) is None"
    script = tmp_path / "script.py"
    script.write_text(ranks, encoding="utf-8")
    own = clone.check(tmp_path, "python", "-c", program)
    assert clone.check(clone.root, "python", str(script)) == own


@thorough(EXHAUSTIVE, r"\[(editable|wheel)")
@thorough(PROCESSES)
@pytest.mark.skipif(sys.platform != "linux", reason="the emulated CANN needs Linux")
@pytest.mark.skipif(not clones.has_torch_npu(), reason="torch_npu is not installed, or aborts beside this torch")
def test_a_program_on_the_emulated_cann(clone: Clone, tmp_path: Path) -> None:
    opened = "import hal; print(hal.open({'backend': 'npu', 'dtype': 'float16'}).name)"
    for folder in (clone.root, tmp_path):
        text = clone.check(folder, "hal", "emulate", "--", "python", "-c", opened, npu=True)
        assert text.split()[-1] == "npu"
    built = "from emulated_cann.build import build; print(build())"
    own = subprocess.run([sys.executable, "-c", built], capture_output=True, text=True, check=True).stdout
    assert clone.check(tmp_path, "python", "-c", built, npu=True) == own, "it was compiled again"
