"""Tests that stdout has only a command's result, and for errors when stdout or a file cannot be written."""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from helpers.checkpoints import random_checkpoint
from helpers.distributions import install
from helpers.thorough import PROCESSES, thorough

from hal.cli import main
from hal.cli.stdout import ResultCommand

PROGRAM = "from hal_command import main; main()"
NOISY = """
import atexit, ctypes, os, subprocess, sys
import hal, torch

stdout = sys.stdout

def make_noise(where):
    print(f"noise of Python in {where}")
    stdout.write(f"noise of a stream that was kept in {where}\\n")
    os.write(1, f"noise of a descriptor in {where}\\n".encode())
    ctypes.CDLL(None).printf(f"noise of C in {where}\\n".encode())
    subprocess.run(["echo", f"noise of a child in {where}"], check=True)

def rms_norm(x, weight, eps):
    make_noise("a kernel")
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

class Noisy(hal.vendor.Driver):
    name, api_version, priority = "noisy", (4, 0), -1
    def probe(self):
        make_noise("probe")
        return hal.vendor.Probe(True, "it is loud")
    def open(self, options):
        make_noise("open")
        return hal.Backend("noisy", hal.vendor.HostDevice(), kernels={"rms_norm": rms_norm})

make_noise("import")
atexit.register(make_noise, "exit")
"""
EVERYWHERE = [
    f"noise of {what} in {where}"
    for where in ("import", "probe", "open", "exit")
    for what in ("Python", "a stream that was kept", "a descriptor", "C", "a child")
]
NO_ROOM = re.compile("^error: .* cannot be written.*: No space left on device\nremedy: free disk space, or ", re.M)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("output") / "qwen3")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH with a vendor's package that writes to stdout."""
    folder = tmp_path_factory.mktemp("output") / "site"
    entry_points = "[hal.drivers]\nnoisy = noisy_driver:Noisy\n[hal.commands]\nloud = loud_command:loud\n"
    install(folder, "noisy", entry_points, noisy_driver=NOISY)
    (folder / "loud_command.py").write_text(
        textwrap.dedent("""
            import ctypes, os, click

            @click.command()
            def loud():
                print("Python")
                os.write(1, b"descriptor\\n")
                ctypes.CDLL(None).printf(b"C\\n")
        """)
    )
    return folder


@pytest.fixture
def run(repository: Path, site: Path, tmp_path: Path) -> Any:
    """Return a function that runs the command in a subprocess."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HAL_") or name == "HAL_CACHE_DIR"}
    environ = {**kept, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(*arguments: str | Path, stdout: Any = subprocess.PIPE, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, arguments)],
            cwd=repository,
            env=environ,
            stdout=stdout,
            stderr=more.pop("stderr", subprocess.PIPE),
            text=True,
            timeout=300,
            check=False,
            **more,
        )

    return start


class TestNoise:
    """A vendor's package writes to stdout; hal sends that to stderr."""

    @thorough(PROCESSES)
    def test_of_texts(self, run: Any, checkpoint: Path) -> None:
        arguments = ("generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", "4", "--backend")
        quiet, noisy = run(*arguments, "cpu"), run(*arguments, "noisy")
        assert noisy.returncode == 0, noisy.stderr
        assert noisy.stdout == quiet.stdout
        assert [each for each in EVERYWHERE if each not in noisy.stderr] == []
        assert "noise of C in a kernel" in noisy.stderr

    @thorough(PROCESSES)
    def test_of_tables(self, run: Any) -> None:
        result = run("ops")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("operation ")
        assert "noise" not in result.stdout
        assert [each for each in EVERYWHERE if each not in result.stderr] == []

    def test_into_one_terminal_or_pipe_nothing_is_lost(self, run: Any) -> None:
        result = run("backends", stderr=subprocess.STDOUT)
        assert "it is loud" in result.stdout
        assert "noise of C in probe" in result.stdout

    @thorough(PROCESSES)
    def test_without_a_stderr(self, run: Any) -> None:
        result = run("backends", preexec_fn=lambda: os.close(2))
        assert result.returncode == 0
        assert "it is loud" in result.stdout
        assert "noise" not in result.stdout

    def test_under_a_test_runner(self, site: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        """click's runner replaces sys.stdout, which does not affect C code."""
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, "noisy_driver", raising=False)
        result = CliRunner().invoke(main, ["backends"])
        atexit.unregister(sys.modules["noisy_driver"].make_noise)
        assert "it is loud" in result.stdout
        assert "noise" not in result.stdout
        assert "noise of Python in probe" in result.stderr
        out, err = capfd.readouterr()
        assert out == ""
        assert "noise of C in probe" in err
        print("afterwards")  # noqa: T201 - stdout is as it was
        assert capfd.readouterr().out == "afterwards\n"

    @thorough(PROCESSES)
    def test_a_contributed_command_has_its_stdout(self, run: Any) -> None:
        result = run("loud")
        assert sorted(result.stdout.split()) == ["C", "Python", "descriptor"]

    def test_every_command_of_hals_own_is_protected(self) -> None:
        assert [command for command in _leaves(main) if not isinstance(command, ResultCommand)] == []


def _leaves(command: click.Command) -> Iterator[click.Command]:
    if not isinstance(command, click.Group):
        yield command
        return
    for each in command.commands.values():
        yield from _leaves(each)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a /dev/full")
class TestFull:
    @thorough(PROCESSES, r"\[arguments0")
    @pytest.mark.parametrize("arguments", [["ops"], ["--help"]])
    def test_stdout(self, run: Any, arguments: Sequence[str]) -> None:
        with open("/dev/full", "w") as full:
            result = run(*arguments, stdout=full)
        assert result.returncode == 2
        assert NO_ROOM.search(result.stderr)
        assert "Traceback" not in result.stderr
        assert "ignored" not in result.stderr

    @thorough(PROCESSES)
    def test_texts(self, run: Any, checkpoint: Path) -> None:
        with open("/dev/full", "w") as full:
            result = run("generate", checkpoint, "--prompt", "the cat", "--max-new-tokens", "2", stdout=full)
        assert result.returncode == 2
        assert NO_ROOM.search(result.stderr)
        assert "Traceback" not in result.stderr

    def test_a_contributed_command(self, run: Any) -> None:
        with open("/dev/full", "w") as full:
            result = run("loud", stdout=full)
        assert result.returncode == 2
        assert NO_ROOM.search(result.stderr)
        assert "ignored" not in result.stderr

    @thorough(PROCESSES)
    def test_stderr(self, run: Any) -> None:
        with open("/dev/full", "w") as full:
            assert run("nothing", stderr=full).returncode == 2
            assert run("ops", stdout=full, stderr=full).returncode == 2

    def test_a_dump(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "0-trace.py").symlink_to("/dev/full")
        result = CliRunner().invoke(
            main, ["explain", str(checkpoint), "--backend", "cpu", "--compiler", "graph", "--dump", str(tmp_path)]
        )
        assert result.exit_code == 2, result.exception
        assert result.stderr.startswith(f"error: {tmp_path} cannot be written: No space left on device\nremedy: ")

    @thorough(PROCESSES)
    def test_figures(self) -> None:
        options = ["--shapes", "tiny", "--context", "8", "--repeats", "3", "--compiler", "eager", "--backend", "cpu"]
        result = CliRunner().invoke(main, ["bench", "decode", *options, "--figures", "/dev/full"])
        assert result.exit_code == 2, result.exception
        assert "error: /dev/full cannot be written: No space left on device\nremedy: " in result.stderr


class TestClosed:
    @thorough(PROCESSES)
    def test_stdout(self, run: Any) -> None:
        result = run("ops", stdout=None, preexec_fn=lambda: os.close(1))
        assert result.returncode == 2
        said = "error: the result cannot be written: stdout is closed\nremedy: start hal with an open stdout\n"
        assert said in result.stderr

    @thorough(PROCESSES, r"\[arguments1")
    @pytest.mark.parametrize("arguments", [["backends"], ["ops", "--help"]])
    def test_a_reader_that_has_left(self, run: Any, arguments: Sequence[str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stdout:
            result = run(*arguments, stdout=stdout)
        assert result.returncode == 141
        assert [line for line in result.stderr.splitlines() if "noise" not in line] == []

    def test_a_pipe_to_something_else_is_no_reader(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> None:
            raise BrokenPipeError

        monkeypatch.setitem(main.commands, "broken", click.Command("broken", callback=broken))
        result = CliRunner().invoke(main, ["broken"])
        assert isinstance(result.exception, RuntimeError)
        assert isinstance(result.exception.__cause__, BrokenPipeError)
