"""Python processes for tests of the emulated CANN."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def python(
    *arguments: str, environ: Mapping[str, str] | None = None, timeout: float = 200, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with an environment, by default this process's, and more variables, for at most some seconds."""
    variables = {**(os.environ if environ is None else environ), **more}
    return subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=timeout, check=False
    )


def emulate(*arguments: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``emulated-cann run``."""
    return python("-m", "emulated_cann.command", "run", *arguments, environ=environ)


def ends_well(*arguments: str, **variables: str) -> None:
    """Run Python, which prints "well" last if all its checks hold."""
    done = python(*arguments, **variables)
    assert done.stdout == "well\n", done.stderr


def on_soc(soc: str, script: str, environ: Mapping[str, str], *arguments: str, **options: Any) -> str:
    """Run a script on emulated NPUs of another product; return what it prints. Options are those of the command."""
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    done = emulate("--soc", soc, *given, "--", sys.executable, "-c", script, *arguments, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout
