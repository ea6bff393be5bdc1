"""Make a folder with Python, torch, torch_npu and hal's dependencies for Arm, which qemu emulates.

    python tools/processors/arm_root.py FOLDER
    ARM_CPU=max FOLDER/bin/python -m hal doctor

FOLDER is replaced. Debian's apt fetches Python, and pip the rest. hal and the emulated CANN are not copied: their
sources are read where they are. Compilers and ninja are those of this machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import requires
from pathlib import Path

from emulated_cann.ninja_build import ninja_program
from packaging.requirements import Requirement

DEBIAN = """
python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g
libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1
"""
TORCH = ("torch==2.13.0+cpu", "torch==2.10.0")
"""PyTorch's own index has the first; the package index has builds for CUDA since the second."""
TORCH_NEEDS = ("sympy", "networkx", "mpmath", "fsspec")
OF_TORCH = "--extra-index-url=https://download.pytorch.org/whl/cpu"
TESTS_NEED = ("pytest", "pytest-benchmark")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")

# Python takes this script for itself, so that it starts other processes by it. torch imports torch_npu, which fails
# without CANN, unless it is told not to.
PYTHON = """#!/bin/sh
export PYTHONHOME={root}/usr TORCH_DEVICE_BACKEND_AUTOLOAD=0 CXX=aarch64-linux-gnu-g++
exec qemu-aarch64 -cpu ${{ARM_CPU:-neoverse-n1}} -0 "$0" -L {root} {root}/usr/bin/python3.11 "$@"
"""


def main(folder: Path) -> None:
    """Make the folder unless this program has made it."""
    packages, made_by = folder / "usr/local/lib/python3.11/dist-packages", folder / "made-by.py"
    program = Path(__file__).read_text(encoding="utf-8")
    if made_by.exists() and made_by.read_text(encoding="utf-8") == program:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        _unpack(Path(scratch), folder)
    if not any(_install(packages, torch, OF_TORCH) for torch in TORCH):
        sys.exit(f"none of {', '.join(TORCH)} can be had for Arm")
    ours = [each for each in map(Requirement, requires("torch-hal") or ()) if each.name != "torch"]
    torch_npu = next(f"{each.name}{each.specifier}" for each in ours if each.name == "torch-npu")
    if not _install(packages, torch_npu):
        sys.exit(f"{torch_npu} cannot be had for Arm")
    # With what these need, which pip would find only for this processor's torch.
    needed = [*(str(each) for each in ours if not each.marker), *TORCH_NEEDS, *TESTS_NEED, "ninja"]
    if not _install(packages, *needed, deps=True):
        sys.exit(f"{', '.join(needed)} cannot be had for Arm")
    for name in ("torch_hal", "emulated_cann"):
        for path in Path(sysconfig.get_path("purelib")).glob(f"*{name}*"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, packages / path.name)
    for path in (folder / "bin", folder / "usr/local/bin"):
        path.mkdir(exist_ok=True)
    shutil.copy(ninja_program(), folder / "usr/local/bin")  # This machine's: it starts compilers.
    python = folder / "bin/python"
    python.write_text(PYTHON.format(root=folder), encoding="utf-8")
    python.chmod(0o755)
    made_by.write_text(program, encoding="utf-8")


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
