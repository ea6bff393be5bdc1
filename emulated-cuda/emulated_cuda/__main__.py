"""Run a command on the emulated CUDA, such as ``emulated-cuda hal backends``.

Processes that the command starts run on it too.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from .build import CannotEmulate, build

HERE = Path(__file__).parent


def environment(libraries: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make Python load the emulator from ``startup/sitecustomize.py``.

    Args:
        libraries: the folder of the emulator's libraries.
        environ: the environment to extend.
    """
    paths = [str(HERE / "startup"), *filter(None, environ.get("PYTHONPATH", "").split(":"))]
    return {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",  # The program waits for each kernel before it launches the next.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # Nothing is compiled, so compiler worker processes are not needed.
        **environ,
        "EMULATED_CUDA": str(libraries),
        "CUDA_HOME": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "PYTHONPATH": ":".join(dict.fromkeys(paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]),
    }


def main(command: list[str]) -> None:
    """Replace this process with the command."""
    if not command:
        raise SystemExit("usage: emulated-cuda COMMAND [ARGUMENT ...]")
    try:
        environ = environment(build(), os.environ)
    except CannotEmulate as error:
        raise SystemExit(str(error)) from None
    program = shutil.which(command[0], path=environ["PATH"])
    if program is None:
        raise SystemExit(f"command not found: {command[0]}")
    os.execve(program, command, environ)


def command() -> None:
    """Run the command ``emulated-cuda``."""
    main(sys.argv[1:])


if __name__ == "__main__":
    command()
