"""Tests of the program that runs vLLM's own tests: its cache of models, and how it counts and explains outcomes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

GUARDED = """from vllm.platforms import current_platform

if not current_platform.is_cuda():
    pytest.skip(reason="only on CUDA", allow_module_level=True)

MODEL = "facebook/opt-125m"
"""
REPORT = """<testsuites><testsuite>
<testcase classname="tests.v1.test_one" name="test_passes"/>
<testcase classname="tests.v1.test_one.TestClass" name="test_skips"><skipped message="only on CUDA"/></testcase>
<testcase classname="tests.v1.test_one" name="test_fails"><failure message="assert 1 == 2">...</failure></testcase>
<testcase classname="tests.v1.test_one" name="test_in_a_process"><error message="RuntimeError: See root cause above">
</error><system-out>hal.errors.ConfigError: hal does not support vLLM's lora_config
RuntimeError: See root cause above</system-out></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("vllm_own_tests")


def test_outcomes_have_the_file_and_the_cause(own: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert own.outcomes(report) == [
        ("v1/test_one", "passed", ""),
        ("v1/test_one", "skipped", "only on CUDA"),
        ("v1/test_one", "failed", "assert 1 == 2"),
        ("v1/test_one", "failed", "hal refuses lora_config"),
    ]


def test_a_copy_has_no_guard(own: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text(GUARDED, encoding="utf-8")
    copy = own.unguarded(path)
    assert copy != path
    assert path.read_text(encoding="utf-8") == GUARDED
    assert "skip" not in copy.read_text(encoding="utf-8")
    assert 'MODEL = "facebook/opt-125m"' in copy.read_text(encoding="utf-8")
    assert own.unguarded(copy) == copy


def test_the_hubs_names_are_one_checkpoint(own: ModuleType, tmp_path: Path) -> None:
    trained = own.ROOT / "checkpoints" / "tiny-python"
    own.make_cache(tmp_path, trained)
    (model,) = (tmp_path / "hub").glob("models--facebook--opt-125m")
    snapshot = model / "snapshots" / (model / "refs" / "main").read_text(encoding="utf-8")
    weights = "model.safetensors"
    assert (snapshot / weights).read_bytes() == (trained / weights).read_bytes()
    assert json.loads((snapshot / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"] == 2048
