"""Tests for Triton kernels: in Triton's interpreter, on a GPU if there is one, and compiled for other GPUs.

Triton chooses the way when it is imported, for the whole process. So each file of tests runs in a subprocess.
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
from helpers.thorough import AGAIN, DRAW, EXHAUSTIVE, PROCESSES, thorough

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


FILES = ("triton_rows.py", "triton_attention.py", "triton_experts.py", "triton_low_bits.py", "triton_recurrent.py")


def passes(file: str, *, interpret: bool, marked: str = "") -> None:
    """Run a file's tests in a subprocess; check that they pass. ``marked`` selects among them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    # numpy, which the interpreter uses, warns about every infinity.
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
        "-m",
        marked,
        file,
    ]
    ran = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-10000:] + ran.stderr[-5000:]
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


@thorough(AGAIN, r"\[triton_(attention|experts|recurrent|rows)")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    passes(file, interpret=True, marked="not thorough")


@thorough(EXHAUSTIVE)
@thorough(DRAW)
@pytest.mark.parametrize("file", FILES)
def test_further_cases_in_the_interpreter(file: str) -> None:
    passes(file, interpret=True, marked="thorough")


@thorough(EXHAUSTIVE, r"\[triton_compiled_(experts|layers)")
@thorough(AGAIN)
@pytest.mark.parametrize("file", ["triton_compiled.py", "triton_compiled_experts.py", "triton_compiled_layers.py"])
def test_compiled_for_gpus(file: str) -> None:
    passes(file, interpret=False)


@thorough(PROCESSES)
def test_fences_hold() -> None:
    """An out-of-bounds read of an argument in the interpreter kills the process."""
    code = (
        "import torch; from helpers import triton_checking as c\n"
        "x = torch.zeros(7); f = c.fenced(x, '{side}'); assert torch.equal(f, x); "
        "print('inside'); c.ctypes.string_at(f.data_ptr() + {offset}, 1); print('outside')"
    )
    for side, offset in (("before", -1), ("after", 7 * 4)):
        ran = subprocess.run(
            [sys.executable, "-c", code.format(side=side, offset=offset)],
            cwd=TESTS,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == -signal.SIGSEGV, ran.stderr
        assert ran.stdout.split() in ([], ["inside"])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU, or torch is not built for CUDA")
def test_on_the_gpu(file: str) -> None:
    passes(file, interpret=False)
