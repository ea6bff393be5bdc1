"""Tests for ``hal new-driver``: the package that it writes is complete, installs and runs; errors are explained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result
from helpers import console_script
from helpers.thorough import AGAIN, EXHAUSTIVE, PROCESSES, thorough

from hal.cli import main
from hal.cli.commands.new_driver import FILES

NAME = "acme_x1"
WRITTEN = {
    ".gitignore",
    "README.md",
    "acme_x1_hal/__init__.py",
    "acme_x1_hal/driver.py",
    "acme_x1_hal/kernels.py",
    "pyproject.toml",
    "tests/test_conformance.py",
}


def new_driver(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["new-driver", *map(str, arguments)])


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@attrs.frozen
class Installed:
    """The package, installed in a virtual environment."""

    folder: Path
    python: Path

    def run(self, *arguments: str) -> str:
        """Run Python in the environment from the package's folder; return its output."""
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("HAL_", "PYTEST_"))}
        environ |= {"HAL_CACHE_DIR": os.environ.get("HAL_CACHE_DIR", ""), "OMP_NUM_THREADS": "1"}
        return checked([str(self.python), *arguments], self.folder, environ)

    def hal(self, *arguments: str) -> str:
        return self.run("-P", "-c", "from hal.cli import main; main()", *arguments)


def checked(command: Sequence[str], folder: Path, environ: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vendor") / "acme"
    result = new_driver(NAME, folder)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def installed(written: Path) -> Installed:
    """Install it in a fresh environment that has access to this one's packages, since tests cannot download."""
    home = written.parent / "environment"
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    here = {path for path in sys.path if Path(path).name == "site-packages"}
    (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({each!r})\n" for each in sorted(here)))
    python = home / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    checked([str(python), "-m", "pip", "install", *options, "-e", str(written)], written)
    return Installed(written, python)


def test_it_writes_the_whole_package(written: Path) -> None:
    assert files(written) == WRITTEN
    for name in WRITTEN:
        text = (written / name).read_text(encoding="utf-8")
        assert "acme" in text.lower() or name in (".gitignore", "acme_x1_hal/kernels.py")
        assert "${" not in text


def test_it_says_what_it_wrote_and_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme-hal").mkdir()  # an empty one is enough
    result = new_driver("acme")
    assert result.exit_code == 0, result.output
    assert {f"acme-hal/{name}" for name in files(tmp_path / "acme-hal")} <= set(result.output.split())
    for command in ("cd acme-hal", "pip install -e '.[test]'", "hal doctor --backend acme", "pytest"):
        assert f"  {command}\n" in result.output
    assert "pytest takes minutes. README.md has a short form" in result.output


def test_the_readme_counts_steps_that_name_what_is_there(written: Path) -> None:
    readme = (written / "README.md").read_text(encoding="utf-8")
    steps = [line.partition(".")[0] for line in readme.splitlines() if line[:1].isdigit()]
    assert steps == [str(number) for number in range(1, len(steps) + 1)]
    assert len(steps) >= 5
    for name in WRITTEN:
        if name.endswith(("driver.py", "kernels.py", "test_conformance.py")):
            assert f"`{name}`" in readme


@thorough(AGAIN)
def test_what_it_writes_is_clean(written: Path, repository: Path) -> None:
    ruff, mypy = map(console_script, ("ruff", "mypy"))
    if ruff is None or mypy is None:
        pytest.skip("ruff or mypy is not installed; the extra dev has them")
    checked([str(ruff), "check", "--no-cache", "."], written)
    checked([str(ruff), "format", "--no-cache", "--check", "."], written)
    # Uses hal's types from its sources; mypy's errors in those are ignored.
    command = [str(mypy), "--follow-imports=silent", f"--cache-dir={written.parent / 'mypy'}"]
    environ = {**os.environ, "MYPYPATH": str(repository)}
    assert "no issues found in 4 source files" in checked(command, written, environ)


def test_the_templates_are_in_the_package(repository: Path) -> None:
    parser = ConfigParser()
    parser.read(repository / "setup.cfg")
    patterns = parser["options.package_data"]["hal"].split()
    shipped = {path.name for pattern in patterns for path in (repository / "hal").glob(pattern)}
    assert {f"{template}.template" for template in FILES.values()} <= shipped
    assert {path.name for path in (repository / "hal" / "template").iterdir()} <= shipped


@thorough(PROCESSES)
def test_installed_it_is_found(installed: Installed) -> None:
    (row,) = [line for line in installed.hal("backends").splitlines() if line.startswith(NAME)]
    assert row.split()[:4] == [NAME, "yes", "-1", "4.0"]
    assert "uses the CPU" in row
    header, *rows = installed.hal("ops").splitlines()
    column = header.index(NAME)
    assert {row.split()[0] for row in rows if row[column:].strip() == "kernel"} == {"rms_norm", "silu_and_mul"}


@thorough(PROCESSES)
def test_installed_the_doctor_finds_nothing_wrong(installed: Installed) -> None:
    assert installed.hal("doctor", "--backend", NAME).splitlines()[-1] == "everything that is available works"


@thorough(PROCESSES)
def test_installed_the_short_form_is_offered_and_is_short(installed: Installed, written: Path) -> None:
    whole = installed.run("-m", "pytest", "--collect-only", "-p", "no:cacheprovider")
    (offered,) = [line for line in whole.splitlines() if line.startswith("conformance: ")]
    assert re.match(r"conformance: \d+ cases, which take minutes", offered)
    (chosen,) = re.findall(r"pytest -k '([^']+)'", offered)
    assert f"pytest -k '{chosen}'" in (written / "README.md").read_text(encoding="utf-8")
    short = installed.run("-m", "pytest", "--collect-only", "-q", "-k", chosen, "-p", "no:cacheprovider")
    names = re.findall(r"\[(\S+)\]$", short, re.MULTILINE)
    everything = int(offered.split()[1])
    assert 50 < len(names) < everything / 2
    assert {name.partition("/")[0] for name in names} == {"devices", "operations"}
    assert "conformance: " not in short


@thorough(EXHAUSTIVE)
@thorough(AGAIN)
def test_installed_it_passes_conformance(installed: Installed) -> None:
    written = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    _, _, report = written.partition(f"conformance of {NAME}")[2].partition("\n")
    columns, *rows = [line.split() for line in report.splitlines() if line]
    assert (columns[:3], columns[-1]) == (["area", "cases", "passed"], "failed"), written
    table = {row[0]: list(map(int, row[1:])) for row in rows if len(row) == 6 and row[1].isdigit()}
    for area, (cases, passed, skipped, expected, failed) in table.items():
        assert (expected, failed) == (0, 0), f"{area}: {written}"
        assert passed == (0 if area == "graphs" else cases - skipped), f"{area}: {written}"
    assert table["operations"][1] > 100
    assert table["graphs"][2] > 10


@pytest.mark.parametrize("name", ["Acme", "2acme", "acme-x1", "_acme", "", "class", "akmé", "a b", "../acme"])
def test_a_name_must_be_an_identifier(name: str, tmp_path: Path) -> None:
    result = new_driver(name, tmp_path / "folder")
    assert result.exit_code == 2
    assert f"error: {name!r} is not a valid driver name" in result.output
    assert "remedy: choose a lower-case Python identifier" in result.output
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cpu", "a driver 'cpu' is already installed"),
        ("auto", "configurations"),
        ("compilation", "configurations"),
        ("torch", "its distribution would be torch-hal"),
    ],
)
def test_a_name_must_be_free(name: str, problem: str, tmp_path: Path) -> None:
    result = new_driver(name, tmp_path / "folder")
    assert result.exit_code == 2
    assert problem in result.output
    assert "remedy: choose another name" in result.output


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for folder, problem in ((tmp_path, "is not empty"), (tmp_path / "mine.txt", "is not a folder")):
        result = new_driver("acme", folder)
        assert result.exit_code == 2
        assert problem in result.output
        assert "remedy: choose another" in result.output
    assert files(tmp_path) == {"mine.txt"}
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = new_driver("acme", tmp_path / "file" / "acme")
    assert result.exit_code == 2
    assert "error: the package cannot be written" in result.output
    assert "remedy: choose a writable folder" in result.output
