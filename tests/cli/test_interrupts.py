"""Tests that an interrupt ends the command with exit code 130 at any time, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.checkpoints import random_checkpoint
from helpers.thorough import PROCESSES, thorough

import hal_command

PROGRAM = """
import os, sys
from hal_command import main
os.write({descriptor}, b".")
main()
"""
LOST = """
import os, signal, sys
import hal_command

class Caught:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass

def command():
    kept = Caught()
    del kept
    print("still running", flush=True)

class Package:
    main = staticmethod(command)

sys.modules["hal.cli"] = Package
hal_command.main()
"""
CONVERTED = LOST.replace("kept = Caught()\n    del kept", "{body}")


def interrupted(repository: Path, arguments: list[str], delay: float) -> tuple[int, str]:
    """Interrupt a command ``delay`` seconds after Python has started; return its exit code and stderr."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(descriptor=writer), *arguments],
        cwd=repository,
        pass_fds=[writer],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as started:
        assert started.read(1) == b"."
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    try:
        return_code = process.wait(timeout=60)
    finally:
        process.kill()
    assert process.stderr is not None
    with process.stderr:
        return return_code, process.stderr.read().decode()


@thorough(PROCESSES, r"\[(?!0\.005|1\.4)")
@pytest.mark.parametrize("delay", [0.005, 0.2, 0.6, 1.4, 3.0])
def test_at_any_time(repository: Path, endless_checkpoint: Path, delay: float) -> None:
    """During the import of torch, other imports, loading, and generation."""
    arguments = ["generate", str(endless_checkpoint), "--prompt", "the cat", "--max-new-tokens", "1000000"]
    status, stderr = interrupted(repository, arguments, delay)
    assert (status, stderr.splitlines()[-1]) == (130, "interrupted"), stderr
    assert "Traceback" not in stderr
    assert "ignored" not in stderr


@pytest.fixture(scope="module")
def endless_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that generates until it is interrupted."""
    folder = tmp_path_factory.mktemp("interrupts") / "qwen3"
    return random_checkpoint(folder, max_position_embeddings=1 << 20, eos_token_id=None)


def run(repository: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, timeout=60, check=False
    )


def test_one_that_hits_a_destructor_is_not_lost(repository: Path) -> None:
    result = run(repository, LOST)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "body",
    [
        "try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: raise RuntimeError('swallowed')",
        "try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: sys.exit(3)",
    ],
)
def test_one_that_a_library_turns_into_something_else_is_still_one(repository: Path, body: str) -> None:
    result = run(repository, CONVERTED.replace("{body}", body))
    assert result.returncode == 130
    assert result.stderr == ""


def test_one_that_is_swallowed_ends_the_process_all_the_same(repository: Path) -> None:
    body = "try: os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: time.sleep(600)"
    result = run(repository, "import time, hal_command; hal_command.GRACE = 0.2\n" + CONVERTED.replace("{body}", body))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_a_second_one_does_not_wait_for_what_cleans_up(repository: Path) -> None:
    body = (
        "try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGINT); print('cleaned up', flush=True)"
    )
    result = run(repository, CONVERTED.replace("{body}", body))
    assert (result.returncode, result.stdout) == (130, "")


def test_during_the_import_of_torch_it_raises_nothing(repository: Path, tmp_path: Path) -> None:
    """Where C++ code of torch imports modules, an exception ends the process with SIGABRT."""
    package = tmp_path / "torch.py"
    package.write_text(
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: print('raised')"
    )
    body = f"sys.path.insert(0, {str(tmp_path)!r}); import torch"
    result = run(repository, CONVERTED.replace("{body}", body))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_where_it_is_ignored_it_stays_ignored(repository: Path) -> None:
    """As for a script's background job."""
    ignoring = CONVERTED.replace(
        "hal_command.main()", "signal.signal(signal.SIGINT, signal.SIG_IGN); hal_command.main()"
    )
    result = run(repository, ignoring.replace("{body}", "os.kill(os.getpid(), signal.SIGINT)"))
    assert (result.returncode, result.stdout) == (0, "still running\n")


def test_a_bug_keeps_its_traceback(repository: Path) -> None:
    result = run(repository, CONVERTED.replace("{body}", "raise RuntimeError('a bug')"))
    assert result.returncode == 1
    assert "RuntimeError: a bug" in result.stderr


def test_it_is_the_console_script(repository: Path) -> None:
    assert "    hal = hal_command:main\n" in (repository / "setup.cfg").read_text()


ORPHAN = """
import os, sys, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
print(os.getppid(), flush=True)
import hal_command
hal_command._end_with_parent()
print("alive", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_rank_whose_parent_ended_before() -> None:
    result = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=True)
    by, *alive = result.stdout.split()
    if by != "1" or hal_command._is_python(1):
        pytest.skip(f"process {by} adopts orphans, so that it may be torchrun")
    assert alive == []
