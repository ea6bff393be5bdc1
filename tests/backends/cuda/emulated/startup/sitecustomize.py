"""Python imports this when it starts, wherever this folder is on PYTHONPATH: it loads the emulated CUDA."""

import os
import sys
from pathlib import Path

if os.environ.get("EMULATED_CUDA"):
    sys.path.append(str(Path(__file__).parents[2]))  # in which the package `emulated` lies
    try:
        from emulated import activation

        activation.activate()
    except Exception as error:  # which Python would only print
        raise SystemExit(f"the emulated CUDA cannot be loaded: {type(error).__name__}: {error}") from error
