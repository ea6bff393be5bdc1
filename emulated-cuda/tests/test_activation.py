"""Tests for commands on the emulator: the devices that they and their subprocesses find, and their errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from emulated_cuda.calls import in_a_process


def emulated(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command from a shell without the emulator's variables."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("EMULATED_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-m", "emulated_cuda", *command],
        env={**known, "PYTHONPATH": str(Path(__file__).parents[1]), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_drivers_probe_finds_a_gpu_and_its_product_does_not_change() -> None:
    ran = in_a_process("""
from hal.backends.cuda import probe
print(probe.probe().available, probe.DEVICES)
print(probe.probe({**os.environ, "CUDA_VISIBLE_DEVICES": ""}).available)
""")
    assert ran.stdout.splitlines() == ["True /dev", "False"], ran.stderr


def test_a_process_of_a_process() -> None:
    ran = emulated("sh", "-c", f"{sys.executable} -c 'import torch; print(torch.cuda.get_device_name())'")
    assert ran.stdout == "Emulated GPU\n", ran.stderr


def test_without_a_compiler(tmp_path: Path) -> None:
    ran = emulated("true", PATH=str(tmp_path))
    assert ran.returncode == 1
    assert "there is no g++ on the PATH: install g++" in ran.stderr
    assert "Traceback" not in ran.stderr
