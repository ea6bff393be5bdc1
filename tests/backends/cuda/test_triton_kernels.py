"""Triton's kernels: in Triton's interpreter, on a GPU where there is one, and compiled for GPUs that are not there.

Each way is settled when triton is imported, for the whole process; so each file of tests has processes of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import TESTS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def passes(file: str, *, interpret: bool) -> None:
    """Run a file's tests in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    # numpy, which the interpreter computes with, warns of every infinity.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::RuntimeWarning",
        file,
    ]
    ran = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-10000:] + ran.stderr[-5000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


@pytest.mark.parametrize("file", ["triton_rows.py", "triton_attention.py"])
def test_in_the_interpreter(file: str) -> None:
    passes(file, interpret=True)


def test_compiled_for_gpus() -> None:
    passes("triton_compiled.py", interpret=False)


def test_fences_hold() -> None:
    """A read past either end of what kernels are given in the interpreter kills its process."""
    code = (
        "import torch; from helpers import triton_checking as c\n"
        "x = torch.zeros(7); f = c.fenced(x, '{side}'); assert torch.equal(f, x); "
        "print('inside'); c.ctypes.string_at(f.data_ptr() + {offset}, 1); print('outside')"
    )
    for side, offset in (("before", -1), ("after", 7 * 4)):
        ran = subprocess.run(
            [sys.executable, "-c", code.format(side=side, offset=offset)],
            cwd=TESTS, env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == -signal.SIGSEGV, ran.stderr
        assert ran.stdout.split() in ([], ["inside"])


@pytest.mark.parametrize("file", ["triton_rows.py", "triton_attention.py"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU, or a torch that was not built for one")
def test_on_the_gpu(file: str) -> None:
    passes(file, interpret=False)
