"""Runs scripts of torch.distributed on emulated NPUs, in processes of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def environment(devices: int) -> dict[str, str]:
    """Return this process's environment for another one with so many emulated devices."""
    options = {**json.loads(os.environ["EMULATED_CANN_OPTIONS"]), "devices": devices}
    return {**os.environ, "EMULATED_CANN_OPTIONS": json.dumps(options), "OMP_NUM_THREADS": "1"}


def torchrun(script: Path, ranks: int) -> None:
    """Run a script in ranks, each of which prints its ``rank-N-well`` if its checks hold."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(script)], env=environment(ranks), capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert sorted(done.stdout.split()) == [f"rank-{rank}-well" for rank in range(ranks)]
