"""Tests for the command: only texts on stdout, settings from environment and options, and the list of drivers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.checkpoints import random_checkpoint, write_json
from helpers.distributions import install
from helpers.thorough import DRAW, EXHAUSTIVE, MODE, PROCESSES, thorough

import hal
from hal.checkpoint.checkpoint import Checkpoint
from hal.cli import main
from hal.version import __version__

PROMPTS = ("the cat", "é 日本\n", "the hat and the mat sat")
NEW = 12
PROGRAM = "from hal.cli import main; main()"

DRIVERS = """
import hal, torch

class Good(hal.vendor.Driver):
    name, api_version, priority = "good", (4, 0), 5
    def probe(self):
        return hal.vendor.Probe(True)
    def open(self, options):
        hal.config.read(hal.CacheConfig, options)
        return hal.Backend("good", hal.vendor.HostDevice(), kernels={"rms_norm": torch.rms_norm})

class Absent(Good):
    priority = 20
    def probe(self):
        return hal.vendor.Probe(False, "there is no [card]", "buy one of those at the shop around the corner " * 3)

class RaisesInProbe(Good):
    def probe(self):
        raise OSError("bus error")

class ExitsInProbe(Good):
    def probe(self):
        raise SystemExit(3)

class NoProbe(Good):
    def probe(self):
        return None

class NoPriority(Good):
    priority = None

class NoBackend(Good):
    priority = -3
    def open(self, options):
        return None

class RaisesInOpen(Good):
    priority = -1
    def open(self, options):
        raise RuntimeError("the firmware is on fire")
"""
EMULATING = """
import hal

class Emulating(hal.vendor.Driver):
    name, api_version = "emulating", (4, 0)
    def probe(self):
        return hal.vendor.Probe(True)
    def open(self, options):
        raise hal.errors.ConfigError(f"options: {dict(sorted(options.items()))}", "none")
"""
UNLOADABLE = ("misspelt = acme_cli_drivers:Misspelt", "unimportable = no_such_module:Driver")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("HAL_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("cli") / "qwen3", shards=2)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a command that writes until it is interrupted."""
    folder = tmp_path_factory.mktemp("cli") / "qwen3"
    random_checkpoint(folder, max_position_embeddings=1 << 20, eos_token_id=None)
    options = ["--max-new-tokens", "1000000", "--temperature", "1", "--seed", "0"]
    return [sys.executable, "-c", PROGRAM, "generate", str(folder), "--prompt", "the cat", *options]


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install drivers with every kind of problem, beside the CPU driver."""
    names = re.findall(r"class (\w+)", DRIVERS)
    lines = [f"{name.lower()} = acme_cli_drivers:{name}" for name in names]
    install(tmp_path / "site", "acme", "\n".join(["[hal.drivers]", *lines, *UNLOADABLE]))
    named = [f"{name}.name = {name.lower()!r}" for name in names]
    (tmp_path / "site" / "acme_cli_drivers.py").write_text("\n".join([textwrap.dedent(DRIVERS), *named]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "acme_cli_drivers", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.fixture
def emulating_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a driver that prints the options with which it was opened."""
    install(tmp_path / "site", "emulating", "[hal.drivers]\nemulating = emulating_driver:Emulating\n")
    (tmp_path / "site" / "emulating_driver.py").write_text(EMULATING)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "emulating_driver", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), input=stdin)


def generate(checkpoint: Path, *arguments: str | Path, prompts: Sequence[str] = PROMPTS, new: int = NEW) -> Result:
    """Run `hal generate` and check that it succeeds."""
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    result = run("generate", checkpoint, *given, "--max-new-tokens", str(new), *arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def texts(checkpoint: Path, prompts: Sequence[str] = PROMPTS, new: int = NEW, **sampling: Any) -> list[str]:
    """Return the command's expected output, computed with the API."""
    backend = hal.open("cpu")
    opened = Checkpoint.open(checkpoint)
    tokenizer, runner = opened.tokenizer(), hal.Runner(hal.load_model(opened, backend), backend)
    made = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        params = hal.SamplingParams(max_new_tokens=new, stop_token_ids=opened.stop_token_ids, **sampling)
        tokens = [token.token_id for token in hal.generate(runner, [ids], params)]
        made.append(tokenizer.decode(ids + tokens)[len(prompt) :])
    return made


def printed(made: Sequence[str], prompts: Sequence[str] = PROMPTS) -> str:
    """Return the stdout of several prompts."""
    pairs = enumerate(zip(prompts, made, strict=True))
    return "".join(f"--- prompt {index}: {prompt!r}\n{text}\n" for index, (prompt, text) in pairs)


class TestGenerate:
    @pytest.mark.parametrize("compiler", ["eager", "graph"])
    def test_stdout_holds_the_texts_alone(self, checkpoint: Path, compiler: str) -> None:
        result = generate(checkpoint, "--compiler", compiler)
        assert result.stdout == printed(texts(checkpoint))
        (closing,) = result.stderr.splitlines()
        assert closing.startswith(f"{NEW * len(PROMPTS)} tokens in ")
        assert closing.endswith(" tokens/s")

    def test_one_prompt_needs_no_header(self, checkpoint: Path) -> None:
        result = generate(checkpoint, prompts=["the cat"])
        assert result.stdout == texts(checkpoint, ["the cat"])[0] + "\n"
        assert "---" not in result.stderr

    @pytest.mark.shows("texts", "the command")
    def test_json_has_an_object_for_each_prompt(self, checkpoint: Path) -> None:
        tokenizer = Checkpoint.open(checkpoint).tokenizer()
        result = generate(checkpoint, "--json")
        found = [json.loads(line) for line in result.stdout.splitlines()]
        assert [list(each) for each in found] == [["index", "prompt", "text", "token_ids", "finished"]] * len(PROMPTS)
        assert [(each["index"], each["prompt"]) for each in found] == list(enumerate(PROMPTS))
        assert [each["text"] for each in found] == texts(checkpoint)
        for each in found:
            ids = tokenizer.encode(each["prompt"]).ids
            assert tokenizer.decode(ids + each["token_ids"])[len(each["prompt"]) :] == each["text"]
            assert (each["finished"], len(each["token_ids"])) == ("length", NEW)
        assert result.stdout.isascii()
        (alone,) = generate(checkpoint, "--json", prompts=PROMPTS[:1]).stdout.splitlines()
        assert json.loads(alone) == found[0]

    def test_json_ends_with_the_drafts(self, checkpoint: Path) -> None:
        *objects, last = generate(checkpoint, "--json", "--draft", "ngram", "--draft-tokens", 2).stdout.splitlines()
        assert [json.loads(each) for each in objects] == [
            json.loads(each) for each in generate(checkpoint, "--json").stdout.splitlines()
        ]
        drafts = json.loads(last)["drafts"]
        assert [len(drafts[each]) for each in ("drafted", "accepted")] == [2, 2]
        assert all(some <= all_ for some, all_ in zip(drafts["accepted"], drafts["drafted"], strict=True))

    @thorough(MODE, r"\[(?!\])")
    @pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
    def test_prompts_from_a_file_follow_the_others(self, checkpoint: Path, tmp_path: Path, ending: str) -> None:
        lines = ["the mat", r'"a\n" is not unescaped', "日本\x0c\u2028 is one line"]
        content = (ending or "\n").join(lines) + ending
        file = tmp_path / "prompts.txt"
        file.write_bytes(content.encode())
        expected = printed(texts(checkpoint, ["the cat", *lines]), ["the cat", *lines])
        assert generate(checkpoint, "--prompts-file", file, prompts=["the cat"]).stdout == expected
        arguments = ("--prompt", "the cat", "--max-new-tokens", str(NEW), "--prompts-file", "-")
        assert run("generate", checkpoint, *arguments, stdin=content.encode()).stdout == expected

    def test_a_stop_token_ends_the_text_and_is_not_in_it(self, tmp_path: Path) -> None:
        folder = random_checkpoint(tmp_path / "qwen3")
        backend, tokenizer = hal.open("cpu"), Checkpoint.open(folder).tokenizer()
        runner = hal.Runner(hal.load_model(folder, backend), backend)
        prompt = tokenizer.encode("the cat").ids
        tokens = [token.token_id for token in hal.generate(runner, [prompt], hal.SamplingParams(max_new_tokens=NEW))]
        stop = tokens.index(tokens[NEW // 2])
        write_json(folder / "generation_config.json", {"eos_token_id": [0, tokens[stop]]})
        result = generate(folder, prompts=["the cat"])
        assert result.stdout == tokenizer.decode(prompt + tokens[:stop])[len("the cat") :] + "\n"
        assert result.stderr.startswith(f"{stop + 1} tokens in ")

    def test_the_seed_is_shown_and_repeats_the_texts(self, checkpoint: Path) -> None:
        first = generate(checkpoint, "--temperature", "1.5")
        seed = first.stderr.splitlines()[0].removeprefix("seed ")
        assert generate(checkpoint, "--temperature", "1.5", "--seed", seed).stdout == first.stdout
        alone = [
            generate(checkpoint, "--temperature", "1.5", "--seed", str(int(seed) + index), prompts=[prompt]).stdout[:-1]
            for index, prompt in enumerate(PROMPTS)
        ]
        assert first.stdout == printed(alone), f"seed {seed}"

    def test_what_has_no_effect_is_said(self, checkpoint: Path) -> None:
        result = generate(checkpoint, "--top-k", "5", "--seed", "3")
        assert "warning: --top-k, --seed: no effect, because temperature 0" in result.stderr
        assert "warning" not in generate(checkpoint, "--top-k", "5", "--seed", "3", "--temperature", "1").stderr

    @thorough(MODE, r"\[(frequency|presence)")
    @pytest.mark.parametrize(
        ("name", "value"), [("repetition_penalty", 3.0), ("frequency_penalty", 2.0), ("presence_penalty", -2.0)]
    )
    def test_penalties(self, checkpoint: Path, name: str, value: float) -> None:
        result = generate(checkpoint, f"--{name.replace('_', '-')}", str(value))
        assert result.stdout == printed(texts(checkpoint, **{name: value}))
        assert result.stdout != generate(checkpoint).stdout
        assert "no effect" not in result.stderr, "penalties also change the most likely token"

    def test_a_short_end_is_a_warning_on_stderr(self, checkpoint: Path) -> None:
        result = generate(checkpoint, prompts=["the cat"], new=1000)
        assert "warning: prompt 0 gets" in result.stderr
        assert "prompt 0 gets" not in result.stdout

    def test_the_cache_fits_what_is_asked(self, tmp_path: Path) -> None:
        folder = random_checkpoint(tmp_path / "qwen3", max_position_embeddings=6000, num_hidden_layers=1)
        longer_than_the_default = "the cat sat on the mat " * 600
        count = len(Checkpoint.open(folder).tokenizer().encode(longer_than_the_default).ids)
        assert hal.Config().cache.num_tokens < count < 6000
        generate(folder, prompts=[longer_than_the_default], new=2)

    @thorough(DRAW, r"\[3|sizes_that_decode\w+\[decode1")
    @pytest.mark.parametrize("several", [1, 3, 5])
    def test_only_sizes_that_the_prompts_can_fill_are_captured(self, checkpoint: Path, several: int) -> None:
        result = run(
            "-v", "generate", checkpoint, *(["--prompt", "a"] * several), "--max-new-tokens", "2", "--compiler", "graph"
        )
        captured = ["1 sequence", "2 sequences", "4 sequences", "8 sequences"][: {1: 1, 3: 3, 5: 4}[several]]
        assert f"info: captured decode for whole steps: {', '.join(captured)}\n" in result.stderr

    @thorough(DRAW, r"\[3|sizes_that_decode\w+\[decode1")
    @pytest.mark.parametrize("decode", [{"capture_sizes": [4]}, {"max_capture_size": 4, "capture_sizes": [4, 8]}])
    def test_sizes_that_decode_names_are_captured(self, checkpoint: Path, decode: dict[str, object]) -> None:
        compilation = json.dumps({"compiler": "graph", "decode": decode})
        options = ("--prompt", "a", "--max-new-tokens", "2", "--compilation-config", compilation)
        result = run("-v", "generate", checkpoint, *options)
        assert "info: captured decode for whole steps: 4 sequences\n" in result.stderr


class TestSettings:
    """``-v`` prints the captured sizes, and so whether and how the compiler was configured."""

    @staticmethod
    def captured(checkpoint: Path, *arguments: str | Path) -> list[int] | None:
        result = run("-v", "generate", checkpoint, "--prompt", "a", "--max-new-tokens", "2", *arguments)
        assert result.exit_code == 0, (result.stderr, result.exception)
        _, said, rest = result.stderr.partition("captured decode for whole steps: ")
        return [int(size) for size in re.findall(r"(\d+) sequences?", rest.splitlines()[0])] if said else None

    @thorough(PROCESSES)
    def test_options_override_the_environment_key_by_key(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HAL_COMPILATION__COMPILER", "graph")
        monkeypatch.setenv("HAL_COMPILATION__CAPTURE_SIZES", "[1, 3]")
        assert self.captured(checkpoint) == [1, 3]
        assert self.captured(checkpoint, "--compiler", "eager") is None
        assert self.captured(checkpoint, "--compilation-config", '{"max_capture_size": 2}') == [1]
        assert self.captured(checkpoint, "--compilation-config", '{"compiler": "eager"}', "--backend", "cpu") is None
        monkeypatch.setenv("HAL_BACKEND", "no_such_driver")
        assert self.captured(checkpoint, "--backend", "auto") == [1, 3]

    def test_a_table_in_one_variable(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HAL_COMPILATION", '{"compiler": "graph", "capture_sizes": [2]}')
        assert self.captured(checkpoint) == [2]

    @thorough(MODE, r"\[compilation.json")
    @thorough(EXHAUSTIVE, r"\[compilation.toml")
    @thorough(MODE, r"\[compilation\.toml")
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            (None, '{"compiler": "graph", "capture_sizes": [5]}'),
            ("compilation.json", '{"compiler": "graph", "capture_sizes": [5]}'),
            ("compilation.toml", 'compiler = "graph"\ncapture_sizes = [5]\n'),
        ],
    )
    def test_a_compilation_config(self, checkpoint: Path, tmp_path: Path, name: str | None, content: str) -> None:
        if name is not None:
            (tmp_path / name).write_text(content)
        source = content if name is None else tmp_path / name
        assert self.captured(checkpoint, "--compilation-config", source) == [5]
        assert self.captured(checkpoint, "--compilation-config", source, "--compiler", "graph") == [5]

    def test_two_compilers_are_one_too_many(self, checkpoint: Path) -> None:
        arguments = ("--compiler", "eager", "--compilation-config", '{"compiler": "graph"}')
        result = run("generate", checkpoint, "--prompt", "a", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --compiler is eager, but --compilation-config sets graph\nremedy: ")

    def test_a_dtype(self, checkpoint: Path) -> None:
        assert generate(checkpoint, "--dtype", "bfloat16", new=60).stdout != generate(checkpoint, new=60).stdout


class TestLists:
    @pytest.mark.usefixtures("drivers")
    def test_backends_shows_every_driver(self) -> None:
        result = run("backends")
        assert result.exit_code == 0, result.exception
        lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
        assert lines["good"].split() == ["good", "*", "yes", "5", "4.0"]
        assert lines["cpu"].split()[:4] == ["cpu", "yes", "0", "4.0"]
        assert lines["absent"].split()[:4] == ["absent", "no", "20", "4.0"]
        assert "there is no [card]" in lines["absent"]
        assert "around the corner buy one of those at the shop" in lines["absent:"], "nothing is truncated or wrapped"
        assert "bus error" in lines["raisesinprobe"]
        assert "SystemExit(3)" in lines["exitsinprobe"]
        assert "returned None, not a hal.vendor.Probe" in lines["noprobe"]
        assert "has priority = None, which is not an integer" in lines["nopriority"]
        assert "Misspelt" in lines["misspelt"]
        assert "no_such_module" in lines["unimportable"]
        assert "* selected by auto: good" in result.stdout
        assert result.stderr == ""

    @pytest.mark.usefixtures("drivers")
    def test_ops_shows_every_operation_and_driver(self) -> None:
        result = run("ops")
        assert result.exit_code == 0, result.exception
        header, *rows = result.stdout.partition("\n\n")[0].splitlines()
        assert "absent (unavailable)" in header
        assert "raisesinopen (broken)" in header
        assert "raisesinprobe (broken)" in header
        names = re.sub(r" \((unavailable|broken)\)", "", header).split()[1:]
        table = {row.split()[0]: dict(zip(names, row.split()[1:], strict=True)) for row in rows}
        assert set(table) == set(hal.ops.catalogue())
        assert (
            table["rms_norm"] | {"good": "kernel", "cpu": "kernel", "absent": "-", "raisesinopen": "-"}
            == table["rms_norm"]
        )
        assert table["sample"]["good"] == "reference"
        assert table["add_rms_norm"]["good"] == "composed"
        assert "absent is unavailable: there is no [card]\n  remedy: buy one" in result.stdout
        told = (
            "raisesinopen is broken: opening it failed: opening the driver raisesinopen raised RuntimeError: the firm"
        )
        assert told in result.stdout
        assert "opening the driver nobackend returned None, not a hal.Backend" in result.stdout

    @pytest.mark.usefixtures("drivers")
    def test_backends_as_json(self) -> None:
        found = json.loads(run("backends", "--json").stdout)
        drivers = {each["name"]: each for each in found["drivers"]}
        assert found["auto"] == "good"
        assert drivers["good"] == {
            "name": "good",
            "available": True,
            "priority": 5,
            "api_version": "4.0",
            "reason": "",
            "hint": "",
        }
        assert (drivers["absent"]["available"], drivers["absent"]["reason"]) == (False, "there is no [card]")
        assert (drivers["misspelt"]["available"], drivers["misspelt"]["priority"]) == (False, None)

    @pytest.mark.usefixtures("drivers")
    def test_ops_as_json(self) -> None:
        found = json.loads(run("ops", "--json").stdout)
        drivers = {each["name"]: each for each in found["drivers"]}
        assert [drivers[name]["state"] for name in ("cpu", "absent", "raisesinopen")] == [
            "open",
            "unavailable",
            "broken",
        ]
        assert drivers["absent"]["why"].startswith("there is no [card]\n  remedy: buy one")
        operations = {each["name"]: each for each in found["operations"]}
        assert list(operations) == sorted(hal.ops.catalogue())
        rms_norm, fused = operations["rms_norm"], operations["add_rms_norm"]
        assert (rms_norm["fused"], rms_norm["drivers"]["good"], rms_norm["drivers"]["absent"]) == (
            False,
            "kernel",
            None,
        )
        assert (fused["fused"], fused["drivers"]["good"]) == (True, "composed")
        assert operations["sample"]["drivers"]["good"] == "reference"

    @pytest.mark.usefixtures("drivers")
    def test_ops_of_one_driver(self) -> None:
        header = run("ops", "--backend", "cpu").stdout.splitlines()[0]
        assert header.split() == ["operation", "cpu"]
        result = run("ops", "--backend", "cqu")
        assert result.exit_code == 2
        assert "no driver 'cqu' is installed" in result.stderr

    @pytest.mark.usefixtures("emulating_driver")
    def test_ops_emulates_each_driver_that_can(self) -> None:
        found = {each["name"]: each for each in json.loads(run("ops", "--emulate", "--json").stdout)["drivers"]}
        assert found["cpu"]["state"] == "open"
        assert "opening it failed: options: {'emulator': True}" in found["emulating"]["why"]
        assert "options: {}" in run("ops", "--json").stdout

    @pytest.mark.usefixtures("emulating_driver")
    def test_backends_emulates_each_driver_that_can(self) -> None:
        found = {each["name"]: each for each in json.loads(run("backends", "--emulate", "--json").stdout)["drivers"]}
        assert found["cpu"]["available"]
        assert "emulated" in found["npu"]["reason"]

    @pytest.mark.usefixtures("drivers")
    def test_ops_opens_a_driver_with_its_own_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HAL_GOOD_BLOCK_SIZES", "16")
        result = run("ops")
        assert "good is broken: opening it failed: unknown key 'block_sizes' (did you mean" in result.stdout
        assert result.exit_code == 0

    @pytest.mark.skipif(os.path.exists("/dev/davinci0"), reason="there is an NPU")
    def test_the_drivers_that_come_with_hal(self) -> None:
        """Without torch_npu, the NPU driver reports that it is missing, and auto chooses the CPU."""
        _, npu, cuda, cpu, *below = (re.sub(" {2,}", "  ", line) for line in run("backends").stdout.splitlines())
        assert npu == "npu  no  20  4.0  torch_npu is not installed"
        assert "npu: pip install torch-npu" in "\n".join(below)
        assert cuda.startswith(("cuda  no  10  4.0  ", "cuda *  yes  10  4.0  "))
        assert cpu.startswith("cpu" + ("  " if "yes" in cuda else " *  ") + "yes  0  4.0  ")


class TestEmulate:
    def test_it_wants_a_driver(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for variables in ({}, {"HAL_BACKEND": "auto"}):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            for command in (("generate", checkpoint, "--prompt", "a"), ("bench", "decode", "--shapes", "tiny")):
                result = run(*command, "--emulate")
                assert result.exit_code == 2
                assert result.stderr.startswith("error: --emulate needs a driver, and none is named\n")
                assert "remedy: use --backend NAME or HAL_BACKEND" in result.stderr

    @pytest.mark.parametrize("variable", [False, True])
    def test_a_driver_without_an_emulator_is_named(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, variable: bool
    ) -> None:
        backend = () if variable else ("--backend", "cpu")
        if variable:
            monkeypatch.setenv("HAL_BACKEND", "cpu")
        for command in (("generate", checkpoint, "--prompt", "a"), ("bench", "decode", "--shapes", "tiny")):
            result = run(*command, "--emulate", *backend)
            assert result.exit_code == 2
            assert result.stderr.startswith("error: the driver cpu has no emulated device (--emulate): ")
            assert "remedy: omit --emulate, or choose another --backend" in result.stderr
            assert result.stdout == ""

    @pytest.mark.usefixtures("emulating_driver")
    @pytest.mark.parametrize(("variable", "expected"), [(None, True), ("force", "force"), ("false", True)])
    def test_it_is_the_drivers_option(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: object
    ) -> None:
        monkeypatch.setenv("HAL_EMULATING_LANES", "3")
        if variable is not None:
            monkeypatch.setenv("HAL_EMULATING_EMULATOR", variable)
        result = run("generate", checkpoint, "--prompt", "a", "--emulate", "--backend", "emulating")
        assert f"error: options: {{'emulator': {expected!r}, 'lanes': 3}}" in result.stderr, result.exception

    @pytest.mark.usefixtures("emulating_driver")
    def test_other_errors_of_the_configuration_stay_as_they_are(self, checkpoint: Path) -> None:
        arguments = ("--emulate", "--backend", "emulating", "--compiler", "grahp")
        result = run("generate", checkpoint, "--prompt", "a", *arguments)
        assert result.stderr.startswith("error: options: ")
        result = run("generate", checkpoint, "--prompt", "a", "--dtype", "float12", *arguments)
        assert "unknown value 'float12'" in result.stderr
        assert "--emulate" not in result.stderr


class TestProcess:
    def test_help_and_version(self) -> None:
        assert run("--version").stdout == f"hal {__version__}\n"
        for command in ("generate", "backends", "ops"):
            assert command in run("--help").stdout
            assert run(command, "--help").exit_code == 0

    @pytest.mark.parametrize(
        "arguments", [["generate"], ["generate", "x", "--no-such-option"], ["generate", "."], ["nothing"]]
    )
    def test_wrong_usage_exits_with_2(self, arguments: list[str]) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Usage: " in result.stderr

    @pytest.mark.parametrize("command", [["generate"], ["compare", "--backend", "cpu", "--backend", "cpu"]])
    def test_a_missing_checkpoint_is_told_before_a_missing_prompt(self, command: list[str], checkpoint: Path) -> None:
        result = run(*command, checkpoint / "nowhere")
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: no checkpoint at {checkpoint / 'nowhere'}: found nothing\n")
        assert "No prompt given" in run(*command, checkpoint).stderr
        assert "No prompt given" in run(*command, "owner/model-of-the-hub").stderr

    @pytest.mark.usefixtures("drivers")
    def test_a_broken_driver_is_told_without_a_traceback(self, checkpoint: Path) -> None:
        result = run("generate", checkpoint, "--prompt", "a", "--backend", "raisesinopen")
        assert result.exit_code == 2
        assert "opening the driver raisesinopen raised RuntimeError: the firmware is on fire" in result.stderr

    @staticmethod
    def started(command: list[str]) -> subprocess.Popen[bytes]:
        """Start the command, and wait until it has written the start of its text."""
        environ = {**os.environ, "HAL_CACHE__NUM_TOKENS": str(1 << 20)}
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        if not process.stdout.read(1):
            pytest.fail(process.communicate()[1].decode())
        return process

    @thorough(PROCESSES)
    @pytest.mark.shows("streams", "the command")
    def test_a_reader_that_leaves_ends_it_quietly(self, endless: list[str]) -> None:
        process = self.started(endless)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr.read() == b""
        process.stderr.close()

    @thorough(PROCESSES)
    def test_a_process_keeps_its_streams_apart(self, checkpoint: Path, tmp_path: Path) -> None:
        """Runs from another folder, in an ASCII locale, with the settings in the environment."""
        locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        environ = {**os.environ, **locale, "HAL_COMPILATION": json.dumps({"compiler": "graph"})}
        (tmp_path / "prompts").write_text("".join(f"{prompt.strip()}\n" for prompt in PROMPTS), encoding="utf-8")
        command = [sys.executable, "-c", PROGRAM, "-v", "generate", str(checkpoint), "--prompts-file", "prompts"]
        result = subprocess.run(
            [*command, "--max-new-tokens", str(NEW)], cwd=tmp_path, env=environ, capture_output=True, check=False
        )
        prompts = [prompt.strip() for prompt in PROMPTS]
        assert result.stdout.decode() == printed(texts(checkpoint, prompts), prompts), result.stderr.decode()
        assert "captured decode for whole steps" in result.stderr.decode()
        assert result.returncode == 0
