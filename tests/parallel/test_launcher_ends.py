"""Tests that what a command has started ends with it, whatever ends the command, and leaves nothing."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from helpers.checkpoints import random_checkpoint
from helpers.running import Command, command
from helpers.thorough import EXHAUSTIVE, PROCESSES, thorough

from hal.parallel.launch import run_ranks

LIMIT = 20.0
"""Seconds in which everything ends. On an idle machine it is two; here other tests use the cores."""

LAUNCHER = """
import sys
from hal.parallel.launch import run_ranks
run_ranks(["-c", sys.argv[1], sys.argv[2]], 3)
"""
RANK = """
import ctypes, os, signal, subprocess, sys
from pathlib import Path
for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(each, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
if os.fork() == 0 and os.fork() == 0:  # An orphan while its rank still runs.
    os.setsid()
    ctypes.PyDLL(None).sleep(600)
Path(sys.argv[1], os.environ["RANK"]).touch()
ctypes.PyDLL(None).sleep(600)  # Holds the GIL.
"""
HELD = 100 << 20
KILLED = f"""
import os, sys, time
from pathlib import Path
held = bytes([1]) * {HELD}
Path(sys.argv[2], os.environ["RANK"]).touch()
while not Path(sys.argv[2], "0").exists():
    time.sleep(0.05)
time.sleep(1)  # The launcher looks at the memory of ranks from time to time.
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(600)
"""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL)


def check_nothing_is_left(started: Command, folder: Path, number: int) -> None:
    started.process.send_signal(number)
    assert started.seconds_to_end() < LIMIT
    # By the convention of shells, the status of a process that a signal ended is 128 plus its number.
    assert started.process.returncode in ((130,) if number == signal.SIGINT else (-number, 128 + number))
    assert list((folder / "temporary").iterdir()) == []


@thorough(PROCESSES, r"\[SIG(INT|HUP)")
@pytest.mark.parametrize("number", SIGNALS, ids=lambda each: each.name)
def test_ranks_that_ignore_signals(tmp_path: Path, number: signal.Signals) -> None:
    """Ranks in a call that holds the GIL, with children in other sessions, and children that are orphans."""
    program = f"import sys; sys.argv[1:] = {[RANK, str(tmp_path)]!r}\n{LAUNCHER}"
    interruptible = "import sys, hal_command\nclass cli: main = staticmethod(lambda: exec(PROGRAM, {}))\n"
    interruptible = f"PROGRAM = {program!r}\n{interruptible}sys.modules['hal.cli'] = cli\nhal_command.main()"
    with command(["-c", interruptible], tmp_path) as started:
        started.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)))
        assert len(started.running()) >= 1 + 3 * 3
        check_nothing_is_left(started, tmp_path, number)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that generates until it is ended."""
    folder = tmp_path_factory.mktemp("endless") / "qwen3"
    return random_checkpoint(folder, max_position_embeddings=1 << 18, eos_token_id=None)


GENERATE = ("generate", "{}", "--prompt", "the cat", "--max-new-tokens", "200000")
COMMANDS = {
    "generate": (*GENERATE, "--tensor-parallel", "2"),
    "generate, data parallel": (*GENERATE, "--data-parallel", "2"),
    "bench": ("bench", "decode", "{}", "--tensor-parallel", "2", "--repeats", "100000"),
    "compare": ("compare", "{}", "--backend", "cpu", "--tensor-parallel", "2", *GENERATE[2:6]),
    "doctor": ("doctor", "--backend", "cpu", "--tensor-parallel", "2"),
}


@thorough(EXHAUSTIVE, r"\[(generate-(9|15)|generate, |bench|compare)")  # All start their ranks in one way.
@thorough(PROCESSES)
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("generate", signal.SIGKILL),
        ("generate", signal.SIGTERM),
        ("generate", signal.SIGINT),
        ("generate, data parallel", signal.SIGHUP),
        ("bench", signal.SIGTERM),
        ("compare", signal.SIGKILL),
        ("doctor", signal.SIGKILL),
    ],
)
def test_commands(endless: Path, tmp_path: Path, name: str, number: signal.Signals) -> None:
    arguments = [each.format(endless) for each in COMMANDS[name]]
    with command(["-m", "hal_command", *arguments], tmp_path) as started:
        if name == "generate":
            started.wait_until(lambda: (tmp_path / "out").stat().st_size > 20)
        else:  # Others print at the end.
            started.wait_until(lambda: len(started.ranks()) == 2)
        check_nothing_is_left(started, tmp_path, number)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@thorough(PROCESSES)
def test_a_command_whose_torchrun_is_killed(endless: Path, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module", "hal_command"]
    arguments = [each.format(endless) for each in COMMANDS["generate"]]
    with command([*launcher, *arguments], tmp_path) as started:
        started.wait_until(lambda: (tmp_path / "out").stat().st_size > 20)
        assert len(started.ranks()) == 2
        started.process.kill()
        assert started.seconds_to_end() < LIMIT


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (signal.SIGKILL, "memory is the usual cause: lower cache.num_tokens or the batch size"),
        (signal.SIGSEGV, "native code crashed: set PYTHONFAULTHANDLER=1"),
        (signal.SIGTERM, "another program or user sent the signal"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
@thorough(PROCESSES, r"SIG(SEGV|TERM)")
def test_a_rank_that_a_signal_ended(number: signal.Signals, remedy: str, tmp_path: Path) -> None:
    failure = run_ranks(["-c", KILLED, str(int(number)), str(tmp_path)], 2, seconds=60)
    assert failure is not None
    assert failure.status == -number
    assert failure.ending is not None
    problem, found = failure.ending
    assert found.startswith(remedy)
    if number == signal.SIGKILL:
        used = re.fullmatch(
            r"rank 1 of 2 was ended by SIGKILL; when last seen, the ranks used ([0-9.]+), ([0-9.]+) GiB of the "
            r"([0-9.]+) GiB of this machine or container(; meanwhile, .*)?",
            problem,
        )
        assert used is not None, problem
        first, second, total = map(float, used.groups()[:3])
        assert HELD / 2**30 <= min(first, second) <= max(first, second) < HELD / 2**30 + 0.1
        assert total <= psutil.virtual_memory().total / 2**30 + 0.01
    else:
        assert problem == f"rank 1 of 2 was ended by {number.name}"
