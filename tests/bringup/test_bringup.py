"""Tests for ``hal bringup``: what passes, what fails, and that it goes on after failures, hangs and crashes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from helpers import ROOT
from helpers.distributions import install
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

from hal.bringup import run_parts as running
from hal.bringup.parts import PROMPTS, Outcome, Request, compare_texts, parts, read_output
from hal.bringup.run_parts import page, run_parts
from hal.cli import main

REQUEST = Request(checkpoint="model", backend="faulty")


def texts(name: str, *token_ids: list[int], status: Any = "passed") -> Outcome:
    data = [{"prompt": "p", "text": "t", "token_ids": each} for each in token_ids]
    return Outcome(name=name, title=name, command="", status=status, seconds=1.0, lines=["text"], data=data)


def test_texts_that_begin_alike_pass_and_others_fail() -> None:
    reference = texts("reference", [1, 2, 3], [4, 5])
    same, alike, other = (
        texts("texts-a", [1, 2, 3], [4, 5]),
        texts("texts-b", [1, 2, 9], [4, 5]),
        texts("texts-c", [9], [8]),
    )
    compare_texts([reference, same, alike, other])
    assert [each.status for each in (same, alike, other)] == ["passed", "passed", "failed"]
    assert same.lines == ["2 of 2 texts are the reference's", "text"]
    assert "prompt 0: the first 2 tokens agree, of 3" in alike.lines[-1]
    assert len(other.lines) == 4
    half = texts("texts-d", [1, 2, 3], [8])
    compare_texts([reference, half])
    assert half.status == "failed"
    alone = texts("texts-a", [1])
    compare_texts([texts("reference", status="failed"), alone])
    assert alone.lines == ["text"]


@pytest.mark.parametrize("option", ["--backend", "--against"])
def test_a_driver_that_is_not_installed(option: str, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    given = {"--backend": "cpu", option: "nonesuch"}
    arguments = [each for pair in given.items() for each in pair]
    result = CliRunner().invoke(main, ["bringup", str(trained), *arguments, "--output", str(folder)])
    assert (result.exit_code, folder.exists()) == (2, False)
    assert "nonesuch" in result.stderr
    assert "known: " in result.stderr


def test_each_part_judges_what_its_command_prints() -> None:
    judges = {each.name: each.judge for each in parts(REQUEST)}
    assert list(judges) == [
        "doctor",
        "conformance",
        "reference",
        "texts-eager",
        "texts-graph",
        "operations",
        "decode",
        "prefill",
    ]
    cases = [{"name": "a", "status": "passed", "message": ""}, {"name": "b", "status": "skipped", "message": ""}]
    assert judges["conformance"](cases) == (True, ["1 cases passed, 1 were skipped, 0 failed"])
    hung = {"name": "c", "status": "hung", "message": "slow"}
    assert judges["conformance"]([*cases, hung])[0] is False
    assert judges["conformance"]([*cases, hung])[1][1] == "c: hung: slow"
    assert judges["conformance"]([])[0] is False
    assert judges["reference"]([{"prompt": "a", "text": "b"}])[0] is False
    assert "conformance" not in [each.name for each in parts(attrs.evolve(REQUEST, conformance="none"))]


def test_output_is_one_document_or_lines(tmp_path: Path) -> None:
    file = tmp_path / "output"
    assert read_output(file) == []
    file.write_text('{\n "a": 1\n}\n')
    assert read_output(file) == [{"a": 1}]
    file.write_text('noise\n{"a": 1}\n{"a": 2}\n{"a"')
    assert read_output(file) == [{"a": 1}, {"a": 2}]


def test_the_page_escapes_what_commands_print() -> None:
    figures = json.loads((ROOT / "docs" / "reference" / "figures" / "h100-prefill.json").read_text())
    figures["measurements"][0]["contender"] = "hal <b>"
    figures["launches"] = [{"contender": "hal graph", "batch_size": 1, "per_layer": 9}]
    outcomes = [
        Outcome(name="doctor", title="t", command="hal", status="late", seconds=1, lines=["<script>"], log=["a <b>"]),
        Outcome(name="decode", title="t", command="hal", status="passed", seconds=1, lines=[], data=[figures]),
    ]
    content = page(attrs.evolve(REQUEST, checkpoint="a&b"), outcomes)
    assert "<script>" not in content
    assert "<b>" not in content
    assert "a&amp;b" in content
    assert content.count("<svg") == 2
    assert "hal &lt;b&gt;" in content
    assert 'class="late">late' in content
    page(REQUEST, [attrs.evolve(outcomes[1], data=["no figures"]), attrs.evolve(outcomes[1], data=[{}])])


def test_a_folder_that_exists_is_refused(tmp_path: Path, trained: Path) -> None:
    result = CliRunner().invoke(main, ["bringup", str(trained), "--backend", "cpu", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "exists already" in result.stderr


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> pytest.MonkeyPatch:
    """Install the driver ``faulty`` for this process and its children."""
    install(tmp_path / "site", "faulty", "[hal.drivers]\nfaulty = helpers.faulty_driver:FaultyDriver\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{repository / 'tests'}")
    return monkeypatch


def bring_up(trained: Path, folder: Path, *options: str) -> tuple[Result, dict[str, Any]]:
    arguments = ("--backend", "faulty", "--dtype", "float32", "--output", str(folder), *options)
    result = CliRunner().invoke(main, ["bringup", str(trained), *arguments])
    report = json.loads((folder / "report.json").read_text())
    return result, {each["name"]: each for each in report["parts"]}


@thorough(EXHAUSTIVE)
def test_a_device_without_faults_passes(faulty: pytest.MonkeyPatch, trained: Path, tmp_path: Path) -> None:
    faulty.setenv("HAL_FAULTY_FAULT", "nothing")
    result, found = bring_up(trained, tmp_path / "up", "--conformance", "none")
    assert result.exit_code == 0, (result.stderr, found)
    assert {each["status"] for each in found.values()} == {"passed"}
    assert result.stdout.strip() == str(tmp_path / "up" / "index.html")
    assert (tmp_path / "up" / "index.html").read_text().count("<svg") >= 2
    assert found["decode"]["data"][0]["launches"] == []
    assert found["texts-graph"]["lines"][0] == f"{len(PROMPTS)} of {len(PROMPTS)} texts are the reference's"


@thorough(PROCESSES)
def test_wrong_numbers_are_found_and_named(faulty: pytest.MonkeyPatch, trained: Path, tmp_path: Path) -> None:
    faulty.setenv("HAL_FAULTY_FAULT", "nan")
    kept = ("reference", "texts-eager", "operations")
    faulty.setattr(running, "parts", lambda request: [each for each in parts(request) if each.name in kept])
    result, found = bring_up(trained, tmp_path / "up")
    assert result.exit_code == 1
    assert found["reference"]["status"] == "passed"
    assert {found[name]["status"] for name in ("texts-eager", "operations")} == {"failed"}
    assert found["operations"]["lines"][0].startswith("it ended with status 1")
    assert any("silu_and_mul" in each for each in found["operations"]["lines"])


@thorough(PROCESSES)
def test_parts_that_hang_are_ended(faulty: pytest.MonkeyPatch, trained: Path, tmp_path: Path) -> None:
    faulty.setenv("HAL_FAULTY_FAULT", "hang")
    faulty.setattr(
        running, "parts", lambda request: [each for each in parts(request) if each.name in ("texts-eager", "reference")]
    )
    request = Request(checkpoint=str(trained), backend="faulty", dtype="float32", seconds=20)
    reference, text = run_parts(request, {}, tmp_path, lambda said: None)
    assert reference.status == "passed"
    assert text.status == "late"
    assert re.match(r"it did not end, and was ended after 20 s", text.lines[0])


@thorough(EXHAUSTIVE)
def test_conformance_goes_on_after_a_hang(faulty: pytest.MonkeyPatch, trained: Path, tmp_path: Path) -> None:
    faulty.setenv("HAL_FAULTY_FAULT", "hang")
    faulty.setattr(running, "parts", lambda request: [each for each in parts(request) if each.name == "conformance"])
    faulty.setattr(running, "CASE_SECONDS", 8.0)
    faulty.setattr(running, "RESTARTS", 1)
    request = Request(checkpoint=str(trained), backend="faulty", dtype="float32", seconds=120)
    (found,) = run_parts(request, {}, tmp_path, lambda said: None)
    assert found.status == "failed"
    statuses = [each["status"] for each in found.data]
    assert statuses.count("hung") == 2  # in a process each, and the second is the last
    assert statuses.count("passed") > 5
    assert found.data[-1]["name"] == "the cases that are left"
