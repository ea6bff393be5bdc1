"""Tests of commands that start ranks: ``hal compare``, ``hal bench`` and ``hal doctor`` with ``--tensor-parallel``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import TESTS
from helpers.distributions import install
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

from hal.bench.plan import Plan, prepare
from hal.cli import main
from hal.errors import ConfigError
from hal.parallel import Mesh

FAULTY = "[hal.drivers]\nfaulty = helpers.faulty_driver:FaultyDriver\n"
PROMPTS = ("--prompt", "def read_lines(path):", "--prompt", "class Stack:", "--max-new-tokens", "3")

COMPARED = ("--backend", "faulty", "--dtype", "float32", "--tensor-parallel", "2", *PROMPTS)


def run(*arguments: str | Path, status: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HAL_") or name == "HAL_CACHE_DIR"}
    kept["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    result = subprocess.run(
        [sys.executable, "-m", "hal_command", *map(str, arguments)],
        env=kept | environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    """Return the PYTHONPATH with the driver ``faulty``."""
    install(tmp_path / "site", "faulty", FAULTY)
    return os.pathsep.join((str(tmp_path / "site"), str(TESTS)))


def test_a_comparison_of_whole_experts_is_refused(monkeypatch: pytest.MonkeyPatch, trained_experts: Path) -> None:
    monkeypatch.setenv("HAL_PARALLEL__EXPERTS", "all_to_all")
    given = ["compare", str(trained_experts), "--tensor-parallel", "2", "--backend", "cpu", "--prompt", "a"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 2
    assert "hal compare does not support ranks that share whole experts" in result.stderr


class TestCompare:
    @thorough(PROCESSES)
    def test_a_rank_that_computes_its_slice_wrongly(self, faulty: str, trained: Path) -> None:
        result = run("compare", trained, *COMPARED, "--json", status=1, PYTHONPATH=faulty, HAL_FAULTY_FAULT="slices")
        found = json.loads(result.stdout)
        assert [each["agrees"] for each in found] == [False, False]
        calls = [(each["first"]["call"]["operation"], each["first"]["call"]["path"]) for each in found]
        # Rank 0 sees the mistake after the sum, in which rank 1 has its part.
        assert calls == [("all_reduce", "model.layers.0.mlp.down_proj"), ("silu_and_mul", "model.layers.0.mlp")]
        assert all(each["first"]["call"]["step"] == 0 for each in found)
        assert all(each["compared"] > 50 and each["partial"] == 0 for each in found)

    @thorough(EXHAUSTIVE)  # The wrong slices reach a sum, too.
    @thorough(PROCESSES)
    def test_a_wrong_sum(self, faulty: str, trained: Path) -> None:
        text = run("compare", trained, *COMPARED, status=1, PYTHONPATH=faulty, HAL_FAULTY_FAULT="sums").stdout
        assert text.startswith(
            "2 ranks of faulty against one: NOT within rounding (a prefill and 2 decode steps, 6 tokens)"
        )
        for rank in (0, 1):
            assert (
                f"rank {rank}: the first operation that differs is all_reduce in model.layers.1.mlp.down_proj, step 0"
                in text
            )

    @thorough(EXHAUSTIVE, r"\[trained-")
    @thorough(PROCESSES)
    @pytest.mark.parametrize(("name", "dtype"), [("trained", "float32"), ("trained_experts", "bfloat16")])
    def test_ranks_that_agree(self, request: pytest.FixtureRequest, name: str, dtype: str) -> None:
        checkpoint = request.getfixturevalue(name)
        result = run("compare", checkpoint, "--backend", "cpu", "--dtype", dtype, "--tensor-parallel", "2", *PROMPTS)
        assert result.stdout.startswith("2 ranks of cpu against one: within rounding")
        assert result.stdout.count("no operation differs") == 2
        for said in ("loading the whole model", "loading the ranks' parts", "comparing 2 ranks with a single device"):
            assert len(re.findall(rf"^\[\d+ s\] {said}$", result.stderr, re.MULTILINE)) == 1, "one rank says it, once"

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--compiler", "eager", "--compiler", "graph"), "--compiler cannot be used with --tensor-parallel"),
            (
                ("--backend", "cpu", "--backend", "npu"),
                "--tensor-parallel compares ranks of one backend, but --backend names 2",
            ),
            (("--save", "there"), "--save cannot be used with --tensor-parallel"),
        ],
    )
    def test_options_that_exclude_it(self, arguments: tuple[str, ...], problem: str, trained: Path) -> None:
        given = ["compare", str(trained), "--tensor-parallel", "2", *arguments, *PROMPTS]
        result = CliRunner().invoke(main, given)
        assert result.exit_code == 2
        assert problem in result.stderr


class TestBench:
    @thorough(EXHAUSTIVE)
    def test_a_decode_step_of_two_ranks(self, tmp_path: Path) -> None:
        figures = {}
        for ranks in (1, 2):
            file = tmp_path / f"{ranks}.json"
            arguments = ["bench", "decode", "--shapes", "tiny", "--backend", "cpu", "--context", "20", "--repeats", "3"]
            arguments += ["--compiler", "eager", "--compiler", "graph", "--tensor-parallel", str(ranks)]
            arguments += ["--figures", str(file)]
            result = run(*arguments) if ranks > 1 else CliRunner().invoke(main, arguments)
            figures[ranks] = json.loads(file.read_text(encoding="utf-8"))
            assert [each["contender"] for each in figures[ranks]["measurements"]] == ["hal eager", "hal graph"]
            assert ("one of 2 ranks" in result.stdout) == (ranks == 2)
        work = {ranks: each["floors"][0]["work"]["parts"] for ranks, each in figures.items()}
        assert work[1]["cache"] == 2 * work[2]["cache"]
        assert work[1]["weights"] > work[2]["weights"] > work[1]["weights"] / 2  # Norms are not split.

    @pytest.mark.parametrize("options", [{"against": ("transformers",)}, {"memory": True}], ids=str)
    def test_what_only_one_device_can_do(self, options: dict[str, Any]) -> None:
        plan = Plan(workload="decode", shapes="tiny", backend="cpu", length=20, repeats=3, **options)
        mesh = Mesh.planned(2)
        with pytest.raises(ConfigError, match="cannot be used with several ranks"):
            prepare(plan, mesh)
        mesh.close()
