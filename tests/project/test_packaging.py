"""A wheel holds every module under its imported name, and runs from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    # From a copy, so that a build folder neither appears in the checkout nor leaks into the wheel.
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=repository, capture_output=True, text=True, check=True
    )
    for name in files.stdout.splitlines():
        if not (repository / name).exists():  # deleted, and git has not been told yet
            continue
        if name.startswith(("hal/", "backends/", "models/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((repository / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_every_module_is_in_it(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    homes = {"hal": "hal", "backends": "hal/backends", "models": "hal/models"}
    for folder, home in homes.items():
        for file in (repository / folder).rglob("*.py"):
            assert f"{home}/{file.relative_to(repository / folder).as_posix()}" in names
    for file in (repository / "backends").rglob("*"):
        if file.suffix in (".cpp", ".h"):  # compiled where they are used
            assert f"hal/backends/{file.relative_to(repository / 'backends').as_posix()}" in names
    assert "hal/py.typed" in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "hal",
        "hal_command.py",
        "pytest_hal.py",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_runs_from_any_folder(wheel: Path, tmp_path: Path, trained: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    program = (
        "import hal, hal.backends.cpu, hal.models.qwen3\n"
        "assert hal.__file__.startswith(SITE) and hal.backends.cpu.__file__.startswith(SITE), hal.__file__\n"
        f"backend = hal.open('cpu')\nprint(type(hal.load_model({str(trained)!r}, backend)).__name__)\n"
    ).replace("SITE", repr(str(site)))
    environ = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "Qwen3ForCausalLM", result.stderr
