"""Fresh Python processes, for what a process can do only once."""

from __future__ import annotations

import os
import subprocess
import sys

from emulated_cann import options
from hal.backends.npu.installed_cann import HOMES

from helpers import ROOT

OURS = {
    options.SWITCH,
    options.OPTIONS,
    "LD_LIBRARY_PATH",
    "ASCEND_OPP_PATH",
    "TASK_QUEUE_ENABLE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    *HOMES,
}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process without the emulated CANN and without HAL_* variables."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS and not name.startswith("HAL_")}
    folder = {name: value for name, value in os.environ.items() if name == "HAL_CACHE_DIR"}
    # An installed command does not have the current folder on the path.
    return {**kept, **folder, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **more}


def python(*arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python from the root of the repository, and check its exit status."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


def hal(*arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command ``hal``."""
    return python("-c", "from hal.cli import main; main()", *arguments, code=code, **environ)
