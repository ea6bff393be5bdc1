"""Loads the emulated CUDA when Python starts with this folder on PYTHONPATH."""

import os
import sys
from pathlib import Path

if os.environ.get("EMULATED_CUDA"):
    sys.path.append(str(Path(__file__).parents[2]))  # the folder that contains the package `emulated_cuda`
    try:
        from emulated_cuda import activation

        activation.activate()
    except Exception as error:  # Python would only print the exception.
        raise SystemExit(f"the emulated CUDA cannot be loaded: {type(error).__name__}: {error}") from error
