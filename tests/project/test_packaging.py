"""Tests for the sdist, the wheel built from it, and its installation, which must be complete and run anywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from helpers.thorough import PROCESSES, thorough
from packaging.version import Version

import hal

HOMES = {"hal": "hal", "backends": "hal/backends", "models": "hal/models"}
"""Folders of the repository, and of the wheel."""
BUILT = "hal/backends/cpu/native/prebuilt/x86_64-avx2-0123456789ab.so"
"""A library as `hal build-kernels` writes it before a wheel is built."""
DATA = (".cpp", ".h", ".template", ".toml", ".typed")


def checked(command: Sequence[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def shipped(repository: Path) -> set[str]:
    """Return the files that a wheel must contain, by their paths in it."""
    return {
        f"{home}/{file.relative_to(repository / folder).as_posix()}"
        for folder, home in HOMES.items()
        for file in (repository / folder).rglob("*")
        if file.suffix in (".py", *DATA)
    }


@pytest.fixture(scope="module")
def sdist(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that the build folder is neither in the checkout nor in the archive."""
    folder, source = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("source")
    files = checked(["git", "ls-files", "-co", "--exclude-standard"], repository).splitlines()
    for name in files:
        if not (repository / name).exists():  # deleted, but still in git's index
            continue
        if name.startswith(tuple(f"{home}/" for home in HOMES)) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((repository / name).read_bytes())
    library = source / BUILT.replace("hal/backends/", "backends/", 1)
    library.parent.mkdir()
    library.touch()
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    checked([sys.executable, "-c", program], source)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from the sdist, as installers do if there is no wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    checked([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], folder)
    (built,) = folder.glob("*.whl")
    return built


@attrs.frozen
class Environment:
    """A virtual environment with the wheel, and access to the packages of the one that runs the tests."""

    home: Path

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.home)}))

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment from its folder; return its output."""
        environ = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("HAL_", "PYTHON")) or name == "HAL_CACHE_DIR"
        }
        environ |= {"XDG_CACHE_HOME": str(self.home / "cache"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        return checked([str(self.home / "bin" / program), *arguments], self.home, environ)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(environment.home, with_pip=False)
    # Added as paths after the environment's own: .pth files there, such as the checkout's, are not processed.
    paths = dict.fromkeys(path for path in sys.path if Path(path).name == "site-packages")
    (environment.site / "parent.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    environment.run("python", "-m", "pip", "install", *options, str(wheel))
    return environment


def test_every_file_is_in_the_sdist(sdist: Path, repository: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    # Longest prefix first: hal/backends is in hal too.
    sources = set[str]()
    for path in shipped(repository):
        folder, home = next((folder, home) for folder, home in reversed(HOMES.items()) if path.startswith(f"{home}/"))
        sources.add(f"{folder}/{path.removeprefix(f'{home}/')}")
    assert sources - names == set()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "hal_command.py", "pytest_hal.py", "setup.cfg"} <= names


def test_every_file_is_in_the_wheel_and_nothing_else_on_top(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {*shipped(repository), BUILT} - names == set()
    top = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"hal", "hal_command.py", "pytest_hal.py"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("name", ["emulated-cann", "emulated-cuda"])
def test_the_archives_of_an_emulator(name: str, repository: Path, tmp_path: Path) -> None:
    """They have every file of the package, and the license, of which the folder has a link."""
    source, package = tmp_path / "source", name.replace("-", "_")
    files = checked(["git", "ls-files", "-co", "--exclude-standard", name], repository).splitlines()
    for file in filter(lambda file: (repository / file).exists(), files):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes((repository / file).read_bytes())
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    checked([sys.executable, "-c", program], source / name)
    (sdist,) = tmp_path.glob("*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    checked([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    inside = (file.removeprefix(f"{name}/") for file in files if file.startswith(f"{name}/{package}/"))
    wanted = {file for file in inside if not Path(file).name.startswith(".")}
    assert len(wanted) > 20
    assert wanted - names == set()
    assert {each.partition("/")[0] for each in names if ".dist-info" not in each} == {package}
    assert any(each.endswith("licenses/LICENSE") for each in names)


@thorough(PROCESSES)
def test_the_version_is_the_same_everywhere(sdist: Path, wheel: Path, installed: Environment, repository: Path) -> None:
    assert str(Version(hal.__version__)) == hal.__version__
    assert sdist.name == f"torch_hal-{hal.__version__}.tar.gz"
    assert wheel.name == f"torch_hal-{hal.__version__}-py3-none-any.whl"
    assert installed.run("hal", "--version") == f"hal {hal.__version__}\n"
    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    (newest, *_) = re.findall(r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    assert newest == Version(hal.__version__).base_version


@thorough(PROCESSES)
def test_the_installed_package_is_the_wheels_alone(installed: Environment) -> None:
    program = (
        "import importlib.util, json, hal, hal.backends, hal.models\n"
        "from importlib.metadata import distribution, entry_points\n"
        "absent = [name for name in ('backends', 'models') if importlib.util.find_spec(name) is None]\n"
        "files = [hal.__file__, *hal.backends.__path__, *hal.models.__path__]\n"
        "files += [distribution('torch-hal').locate_file('')]\n"
        "drivers = [entry.load().name for entry in entry_points(group='hal.drivers')]\n"
        "print(json.dumps([absent, [str(file) for file in files], sorted(set(drivers))]))\n"
    )
    absent, files, drivers = json.loads(installed.run("python", "-c", program))
    assert absent == ["backends", "models"]
    assert [file for file in files if not file.startswith(str(installed.site))] == []
    assert {"cpu", "cuda", "npu"} <= set(drivers)


@thorough(PROCESSES)
def test_the_installed_data_files_serve(installed: Environment, repository: Path, tmp_path: Path) -> None:
    for path in shipped(repository):
        if path.endswith(DATA):
            source = path.removeprefix("hal/") if path.startswith("hal/backends/") else path
            assert (installed.site / path).read_bytes() == (repository / source).read_bytes()
    installed.run("hal", "new-driver", "acme", str(tmp_path / "acme-hal"))
    assert (tmp_path / "acme-hal" / "acme_hal" / "driver.py").exists()


@thorough(PROCESSES)
def test_the_installed_package_loads_a_model(installed: Environment, trained: Path) -> None:
    program = f"import hal; print(type(hal.load_model({str(trained)!r}, hal.open('cpu'))).__name__)"
    assert installed.run("python", "-c", program) == "Qwen3ForCausalLM\n"
