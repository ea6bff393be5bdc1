"""Make a folder with Python, torch and hal's dependencies for Arm, which `qemu-aarch64 -L FOLDER` runs.

    python tools/processors/arm_root.py FOLDER

Debian's apt fetches Python, and pip the rest. hal itself is not copied: its sources are read where they are.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

DEBIAN = """
python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g
libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1
"""
TORCH = ("torch==2.13.0+cpu", "torch==2.10.0")
"""PyTorch's own index has the first; the package index has builds for CUDA since the second."""
TORCH_NEEDS = ("sympy", "networkx", "mpmath", "fsspec")
OF_TORCH = "--extra-index-url=https://download.pytorch.org/whl/cpu"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


def main(folder: Path) -> None:
    """Make the folder unless it is there."""
    packages = folder / "usr/local/lib/python3.11/dist-packages"
    if (packages / "hal-is-linked").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        _unpack(Path(scratch), folder)
    if not any(_install(packages, torch, OF_TORCH) for torch in TORCH):
        sys.exit(f"none of {', '.join(TORCH)} can be had for Arm")
    needed = [
        each for each in map(Requirement, requires("torch-hal") or ()) if each.name != "torch" and not each.marker
    ]
    # With what these need, which pip would find only for this processor's torch.
    for each in needed:
        if not _install(packages, str(each), deps=True):
            sys.exit(f"{each} cannot be had for Arm")
    if not _install(packages, *TORCH_NEEDS, deps=True):
        sys.exit(f"{', '.join(TORCH_NEEDS)} cannot be had for Arm")
    for path in Path(sysconfig.get_path("purelib")).glob("*torch_hal*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, packages / path.name)
    (packages / "hal-is-linked").touch()


def _unpack(scratch: Path, folder: Path) -> None:
    (scratch / "lists/partial").mkdir(parents=True)
    (scratch / "archives/partial").mkdir(parents=True)
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", "Dir::State::status=/dev/null"]
    options += [f"Dir::State::lists={scratch / 'lists'}", f"Dir::Cache={scratch}", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-qq", *(part for each in options for part in ("-o", each))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *DEBIAN.split()], check=True, cwd=scratch)
    folder.mkdir(parents=True, exist_ok=True)
    for archive in scratch.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)


def _install(packages: Path, *names: str, deps: bool = False) -> bool:
    """Install packages' builds for Arm, and return whether they were found."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "-q",
        "--retries=1",
        "--only-binary=:all:",
        "--target",
        packages,
    ]
    command += [
        "--python-version=3.11",
        *(f"--platform={each}" for each in PLATFORMS),
        *([] if deps else ["--no-deps"]),
    ]
    return subprocess.run([*command, *names], check=False).returncode == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
