"""The builds of torch that torch_npu cannot be imported beside.

torch's CUDA and ROCm libraries and torch_npu register the same keys of the allocator's configuration when they are
loaded. The second registration throws during the library's initialization, which aborts the process.
"""

from __future__ import annotations

import re
from pathlib import Path

from .errors import Unavailable

CLASHING = {"cuda": "CUDA", "hip": "ROCm"}
"""Platforms of such builds, by their names in ``torch/version.py``."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def install_command(version: str) -> str:
    """Return the command that installs the CPU build of a version of torch, in place of another build of it."""
    # Without +cpu, pip keeps an installed build of the same version.
    return f"pip install torch=={version.partition('+')[0]}+cpu --index-url {CPU_INDEX}"


def check_build(torch: Path, version: str) -> None:
    """Raise :class:`Unavailable` if torch_npu cannot be imported beside a build of torch.

    Args:
        torch: the folder of the package.
        version: its version.
    """
    try:
        text = (torch / "version.py").read_text(encoding="utf-8")
    except OSError:
        return  # no build of PyTorch's lacks the file
    for name, platform in CLASHING.items():
        if found := re.search(rf"""^{name}\s*(?::[^=]*)?=\s*['"]([^'"]*)['"]""", text, re.MULTILINE):
            raise Unavailable(
                f"the installed torch {version} is a build for {platform} {found[1]}, beside which torch_npu aborts "
                "the process",
                f"install torch's CPU build: {install_command(version)}",
            )
