"""Runs Python scripts in processes forked from a server that has imported torch, hal and torch's compilers.

A script starts in milliseconds, where a new process spends seconds of a core on imports.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from helpers.rank_processes import CONTEXT


def run_script(script: Path, folder: Path, environ: Mapping[str, str], *, timeout: float) -> tuple[int | None, str]:
    """Run a script as ``python script`` would.

    Args:
        script: the file. Its output is written beside it.
        folder: the current folder of the process.
        environ: the environment.
        timeout: seconds after which the process is killed.

    Returns:
        The exit status, and what the script and its child processes wrote to stdout and stderr.
    """
    output = script.with_suffix(".output")
    process = CONTEXT.Process(target=_run, args=(str(script), str(folder), dict(environ), str(output)))
    process.start()
    process.join(timeout)
    process.kill()
    process.join()
    return process.exitcode, output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""


def _run(script: str, folder: str, environ: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv[:] = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
