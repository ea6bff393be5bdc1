"""A fresh clone, and an environment with hal and the emulated CANN installed from it, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import attrs
from hal.backends.npu.torch_build import refused_build

EMULATED_CANN = "./emulated-cann"
WAYS = {
    "folder": [".", EMULATED_CANN],
    "editable": ["--editable", ".", "--editable", EMULATED_CANN],
    "wheel": [],
}
"""The arguments of ``pip install`` in the documented ways to install hal; for a wheel, the wheels."""


@attrs.frozen
class Clone:
    """A clone and its environment, which sees the packages of the one that runs the tests, but not torch_npu.

    Attributes:
        root: the clone.
        home: the environment.
        npu: the folder of torch_npu; None if it is not installed, or lies beside torch.
    """

    root: Path
    home: Path
    npu: Path | None

    @property
    def npu_variable(self) -> str:
        """The assignment before a shell's command that needs torch_npu; empty if it lies beside torch."""
        return "" if self.npu is None else f"PYTHONPATH='{self.npu}'"

    def run(self, folder: Path, *command: str, npu: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, with the environment's programs first, and with torch_npu if ``npu``."""
        dropped = ("HAL_", "PYTHON", "TORCH_")
        environ = {
            name: text for name, text in os.environ.items() if not name.startswith(dropped) or name == "HAL_CACHE_DIR"
        }
        environ["PATH"] = os.pathsep.join([str(self.home / "bin"), environ.get("PATH", os.defpath)])
        if npu and self.npu is not None:
            environ["PYTHONPATH"] = str(self.npu)
        return subprocess.run(
            command,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def check(self, folder: Path, *command: str, npu: bool = False) -> str:
        """Run a command, which must succeed, and return its output."""
        result = self.run(folder, *command, npu=npu)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout


def clone(repository: Path, folder: Path, way: str) -> Clone:
    """Make a clone in ``folder``, with changes that are not committed, and install it in one of the ways."""
    root, home = folder / "clone", folder / "environment"
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        if (repository / name).exists() and not name.startswith("tests/"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, root / name)
    venv.create(home, with_pip=False)
    paths = list(dict.fromkeys(Path(path) for path in sys.path if Path(path).name == "site-packages"))
    apart = [path for path in paths if (path / "torch_npu").exists() and not (path / "torch").exists()]
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    # As paths: .pth files there, such as that of an editable hal, are not processed.
    (site / "parent.pth").write_text("".join(f"{path}\n" for path in paths if path not in apart), encoding="utf-8")
    made = Clone(root, home, apart[0] if apart else None)
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    pip = ("python", "-m", "pip")
    what = WAYS[way]
    if way == "wheel":
        made.check(root, *pip, "wheel", *offline, "--wheel-dir", str(home), ".", EMULATED_CANN)
        what = [*map(str, home.glob("*.whl"))]
    made.check(root, *pip, "install", *offline, "--ignore-installed", *what)
    return made


def has_torch_npu() -> bool:
    """Return whether torch_npu is installed, beside torch or apart, and can be imported with this build of torch."""
    return torch_npu_is_installed() and refused_build() is None


def torch_npu_is_installed() -> bool:
    """Return whether torch_npu is installed, beside torch or apart."""
    return find_spec("torch_npu") is not None or any((Path(path) / "torch_npu").exists() for path in sys.path)
