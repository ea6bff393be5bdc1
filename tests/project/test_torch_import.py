"""Tests that hal imports torch late, without the vendors' packages, and leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HELP = """
import sys
from click.testing import CliRunner
from hal.cli import main

lines = [["--version"], ["--help"], *([name, "--help"] for name in main.list_commands(None))]
for line in lines:
    shown = CliRunner().invoke(main, line)
    assert (shown.exit_code, "torch" in sys.modules) == (0, False), line
print(len(lines))
"""
TRACES = """
import importlib.util, os, sys
before = dict(os.environ)
finders = list(sys.meta_path)
import hal
assert importlib.util.find_spec("torch").origin.endswith("torch/__init__.py")
assert "torch" not in sys.modules
import torch
assert os.environ == before
assert [each for each in sys.meta_path if each in finders] == sys.meta_path
print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__)
"""
FAILS = """
import os
before = dict(os.environ)
import hal
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        print(error)
    assert os.environ == before
"""


def run(program: str, *, path: Path | None = None) -> list[str]:
    """Return the lines that a program prints in a process without the variable that hal would respect."""
    environ = {name: text for name, text in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_help_texts_need_no_torch() -> None:
    assert int(*run(HELP)) > 10


def test_completion_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    environ = {"_HAL_COMPLETE": "bash_complete", "COMP_WORDS": "hal gen", "COMP_CWORD": "1"}
    program = f"import os, sys; os.environ |= {environ}; sys.argv = ['hal']; from hal_command import main; main()"
    assert run(program, path=tmp_path) == ["plain,generate"]


def test_it_leaves_no_trace() -> None:
    assert run(TRACES) == ["SourceFileLoader SourceFileLoader"]


def test_a_torch_that_fails_fails_again(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is missing')")
    assert run(FAILS, path=tmp_path) == ["libtorch.so is missing"] * 2
