"""Tests for the messages about what runs, since when, and how long it will take."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import time

from hal import progress


def wait_for(text: str, said: list[str]) -> None:
    end = time.monotonic() + 60
    while text not in said:
        assert time.monotonic() < end, said
        time.sleep(0.01)


def test_what_lasts_is_said_again() -> None:
    said: list[str] = []
    with progress.going_on(said.append, "compiling", interval=0.01):
        wait_for("compiling: still running", said)
    assert said[0] == "compiling"
    length = len(said)
    time.sleep(0.05)
    assert len(said) == length, "nothing is said after the end"


def test_what_counts_says_how_much_is_done_and_what_is_left() -> None:
    said: list[str] = []
    now = 100.0
    with progress.going_on(said.append, "loading", interval=0.01, clock=lambda: now) as done:
        done(0, 400)  # an empty tensor
        wait_for("loading: still running", said)
        now = 110.0
        done(100, 400)
        wait_for("loading: 25%, about 30 s left", said)
        now = 115.0
        wait_for("loading: 25%, about 25 s left", said)
        now = 1000.0
        wait_for("loading: 25%, still running", said)
        done(400, 400)
        wait_for("loading: 100%, still running", said)


def test_rounds_say_what_is_left() -> None:
    said: list[str] = []
    now = 100.0
    rounds = progress.Rounds(said.append, "timing", 20, lambda: now)
    for done in range(1, 21):
        now += 4.0
        rounds.ended(done)
    left = {int(each.split()[1]): int(each.split()[6]) for each in said}
    assert left == {done: 4 * (20 - done) for done in (1, 4, 7, 10, 13, 16, 19)}


def test_messages_say_since_when() -> None:
    said: list[str] = []
    times = iter([100.0, 100.4, 172.0])
    say = progress.since_start(said.append, lambda: next(times))
    say("loading")
    say("compiling")
    assert said == ["[0 s] loading", "[72 s] compiling"]


BAR = """
import logging
from hal.cli.console import logging_to_stderr, progress_bar

with logging_to_stderr("WARNING"), progress_bar("loading") as done:
    done(1, 4)
    logging.getLogger("hal.test").warning("told")
    done(2, 4)
"""


def test_a_warning_has_a_line_of_its_own_above_a_progress_bar() -> None:
    ours, terminal = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", BAR], stderr=terminal, stdin=terminal, env=environ) as process:
        os.close(terminal)
        found = b""
        with contextlib.suppress(OSError):  # the end of a terminal whose program has ended
            while part := os.read(ours, 4096):
                found += part
        os.close(ours)
    assert process.returncode == 0
    before, _, after = found.decode().partition("warning: told")
    assert "loading" in before
    assert after.startswith("\r\n")
    line = re.split(r"[\r\n]", before)[-1]
    assert re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) == "", "the bar is erased first"
