"""Tests for the command on an emulated NPU: generation, launches of a step, `hal doctor`, and the guide's Python."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.npu import processes
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

import hal
from hal.bench import floor
from hal.bench.hal_side import PEERS
from hal.cli import main

PROMPTS = ("def read_lines(path):", "class Stack:", "def main():")
SAMPLED = ("--temperature", "0.85", "--top-p", "0.95", "--seed", "3", "--dtype", "float16")
PROJECTIONS = 4


@pytest.fixture(autouse=True)
def _back_to_the_cpu() -> Iterator[None]:
    yield
    hal.open("cpu")


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def generated(trained: Path, *arguments: str) -> str:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    return run("generate", trained, *prompts, "--max-new-tokens", "24", *SAMPLED, *arguments).stdout


def test_the_text_is_the_cpus(trained: Path) -> None:
    expected = generated(trained, "--backend", "cpu")
    assert generated(trained, "--backend", "npu", "--emulate") == expected
    assert generated(trained, "--backend", "npu", "--emulate", "--compiler", "graph") == expected


@thorough(PROCESSES)
def test_what_torch_npu_prints_is_no_text(trained: Path, tmp_path: Path) -> None:
    """torch_npu writes a warning to stdout when npugraph_ex compiles for the first time."""
    arguments = ("--prompt", PROMPTS[0], "--max-new-tokens", "8", "--dtype", "float16")
    cold = ("--compiler", "npugraph_ex", "--compilation-config", json.dumps({"cache_dir": str(tmp_path)}))
    result = processes.hal("generate", str(trained), *arguments, "--backend", "npu", "--emulate", *cold)
    assert result.stdout == run("generate", trained, *arguments, "--backend", "cpu").stdout
    assert "Warning: torch.save" in result.stderr


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("bench") / "trace.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floor, "READ_BYTES", 1 << 20)
        patch.setattr(floor, "MOST_READ_BYTES", 1 << 20)
        options = ("--shapes", "tiny", "--dtype", "float16", "--context", "130", "--repeats", "3", "--batch-size", "2")
        options += ("--compiler", "eager", "--compiler", "graph")
        result = run("bench", "decode", *options, "--backend", "npu", "--emulate", "--trace", "--figures", file)
    return result.stdout, json.loads(file.read_text())


@thorough(PROCESSES)
def test_the_launches_of_a_layer(traced: tuple[str, dict[str, Any]]) -> None:
    figures = traced[1]
    eager, graph = figures["launches"]
    assert (eager["contender"], graph["contender"]) == ("hal eager", "hal graph")
    for each in (eager, graph):
        assert each["layer"] | {"Matmul": PROJECTIONS, "SwiGlu": 1, "FusedInferAttentionScoreV3": 1} == each["layer"]
        assert each["layer"]["RmsNorm"] + 2 * each["layer"].get("AddRmsNorm", 0) >= 2
        assert each["outside"]["Matmul"] == 1
        assert each["per_layer"] == sum(each["layer"].values())
    assert figures["launches_per_layer_of_peers"] == {"SGLang 0.5.23, Qwen3, graph mode": 10}
    assert figures["environment"]["emulated"] is True


def test_a_replay_launches_what_an_eager_step_does_and_copies_its_inputs(traced: tuple[str, dict[str, Any]]) -> None:
    """A replay launches the same kernels, except for those that passes fuse."""
    eager, graph = traced[1]["launches"]
    fused = {"Add", "RmsNorm", "AddRmsNorm", "RotaryPositionEmbeddingV2", "ApplyRotaryPosEmbV2"}
    rest = [{name: times for name, times in each["layer"].items() if name not in fused} for each in (eager, graph)]
    assert rest[0] == rest[1]
    assert graph["per_layer"] < eager["per_layer"]
    more = {name: number - eager["outside"].get(name, 0) for name, number in graph["outside"].items()}
    assert {name for name, number in more.items() if number} <= {"InplaceCopy", "copy", "fill", "graph"}
    assert more["InplaceCopy"] + more.get("copy", 0) >= 4


def test_the_table_of_launches(traced: tuple[str, dict[str, Any]]) -> None:
    stdout, figures = traced
    _, _, table = stdout.partition("kernel launches of a step\n\n")
    header, *rows = table.partition("\n\n")[0].splitlines()
    assert header.split("  ")[0] == "batch"
    (total,) = [row.split() for row in rows if row.split()[1] == "all"]
    numbers = [part for each in figures["launches"] for part in (each["per_layer"], sum(each["outside"].values()))]
    assert total == ["2", "all", *map(str, numbers)]
    assert "- other implementations, per layer: 10 by SGLang 0.5.23, Qwen3, graph mode" in table
    assert "- the device is emulated: its times say nothing about hardware" in stdout


@thorough(PROCESSES)
def test_prefills_are_traced_too() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(floor, "MATMUL_SIZES", (32,))
        options = ("--shapes", "tiny", "--dtype", "float16", "--tokens", "20", "--repeats", "3", "--backend", "npu")
        stdout = run("bench", "prefill", *options, "--trace").stdout
    assert "FusedInferAttentionScoreV3" in stdout
    assert "SGLang" not in stdout


OPTIONS = '{"devices": 2}'


@thorough(PROCESSES)
def test_each_emulated_npu_is_examined() -> None:
    start = time.perf_counter()
    result = processes.hal("doctor", "--backend", "npu", "--emulate", "--json", HAL_NPU_EMULATOR_OPTIONS=OPTIONS)
    took = time.perf_counter() - start
    document = json.loads(result.stdout)
    (npu,) = document["drivers"]
    assert npu["status"] == "works"
    assert [device["device"] for device in npu["devices"]] == ["npu:0", "npu:1"]
    for device in npu["devices"]:
        assert "emulated" in device["name"]
        assert {each["outcome"] for each in device["checks"]} == {"passed"}
        assert "graph" in [each["name"] for each in device["checks"]]
        assert device["measures"]["launch_us"] > 0
    assert all(each["fits"] for each in document["packages"] if each["required_by"] == "npu")
    assert took < 60  # about 10 s on two idle cores


@thorough(EXHAUSTIVE)
def test_a_device_that_the_options_name_is_the_only_one() -> None:
    options = {"HAL_NPU_EMULATOR_OPTIONS": OPTIONS, "HAL_NPU_DEVICE": "1"}
    result = processes.hal("doctor", "--backend", "npu", "--emulate", "--json", **options)
    (npu,) = json.loads(result.stdout)["drivers"]
    assert [device["device"] for device in npu["devices"]] == ["npu:1"]


@thorough(PROCESSES)
def test_without_an_npu_the_probe_says_what_to_do() -> None:
    result = processes.hal("doctor", "--backend", "npu", code=1)
    assert "no CANN" in result.stdout
    assert "--emulate" in result.stdout


EMULATED = """
import hal, torch
backend = hal.open("npu")
print(backend.device.name, torch.npu.device_count(), backend.options.emulator)
"""


@thorough(PROCESSES)
def test_a_program_on_the_machine_that_the_command_describes(tmp_path: Path) -> None:
    """The options of the command replace those of the environment, and hal's driver knows that it is emulated."""
    command = ("emulate", "--devices", "3", "--", sys.executable, "-c", EMULATED)
    assert processes.hal(*command, HAL_NPU_EMULATOR_OPTIONS=OPTIONS).stdout == "Ascend910B3 (A2, emulated) 3 on\n"
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    refused = processes.hal(*command, code=2, ASCEND_HOME_PATH=str(tmp_path))
    assert refused.stderr.startswith("error: a real CANN is installed")
    assert "\n  hal emulate --devices 2" in processes.hal("emulate", "--help").stdout


DOCS = processes.ROOT / "docs"
PAGE = DOCS / "how-to" / "run-on-an-npu.md"
LAUNCHES = DOCS / "reference" / "npu-launches.md"


@thorough(PROCESSES)
def test_the_python_of_the_page_runs() -> None:
    """Run the blocks in order in a fresh process."""
    script = "\n".join(
        re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    result = processes.python("-c", script)
    assert "<NpuBackend 'npu' on Device('npu:0', 'Ascend910B3 (A2, emulated)')>" in result.stdout


def test_the_peers_figure_is_the_one_in_the_code() -> None:
    (peer,) = PEERS
    assert PEERS[peer] == 10
    name, model, _ = peer.split(", ")
    text = " ".join(LAUNCHES.read_text(encoding="utf-8").split())
    assert f"Ten per layer is what {name} launches for {model} in bfloat16" in text
