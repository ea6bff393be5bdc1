"""Tests for ``hal chat``, in a pseudo terminal too, and for chat, stop texts and defaults of ``hal generate``."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers.checkpoints import random_checkpoint, with_template, write_json
from helpers.thorough import AGAIN, PROCESSES, thorough

import hal
from hal.cli import main

PROGRAM = "from hal_command import main; main()"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("HAL_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def talker(trained: Path, tmp_path: Path) -> Path:
    """The trained checkpoint, with a chat template."""
    return with_template(trained, tmp_path / "model")


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(main, list(map(str, arguments)), input=stdin)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


def answers(folder: Path, *conversations: list[tuple[str, str]], **sampling: Any) -> list[str]:
    with hal.LLM(folder, backend="cpu") as llm:
        talks = [[{"role": role, "content": content} for role, content in each] for each in conversations]
        return [each.text for each in llm.chat(talks, **sampling)]


@pytest.mark.shows("conversations", "the command")
def test_a_conversation_has_a_memory_until_it_is_reset(talker: Path) -> None:
    options = ("chat", talker, "--backend", "cpu", "--max-new-tokens", "6", "--system", "s")
    stdin = "one\ntwo\n\n/reset\none\n/system other\none\n/nonsense\n/exit\nnever read\n"
    result = run(*options, stdin=stdin)
    (first,) = answers(talker, [("system", "s"), ("user", "one")], max_new_tokens=6)
    second, last = answers(
        talker,
        [("system", "s"), ("user", "one"), ("assistant", first), ("user", "two")],
        [("system", "other"), ("user", "one")],
        max_new_tokens=6,
    )
    assert result.stdout == "".join(f"{text}\n" for text in (first, second, first, last))
    assert len(re.findall(r"\[6 tokens in [\d.]+ s: [\d.]+ tokens/s\]", result.stderr)) == 4
    assert "there is no command /nonsense\n/image FILE" in result.stderr, "the known ones follow"


def test_a_conversation_that_is_too_long_can_be_reset(talker: Path) -> None:
    stdin = f"{'word ' * 1100}\n/reset\none\n"
    result = run("chat", talker, "--backend", "cpu", "--max-new-tokens", "2", stdin=stdin)
    assert "begin a new one with /reset" in result.stderr
    assert result.stdout == answers(talker, [("user", "one")], max_new_tokens=2)[0] + "\n"


def test_a_checkpoint_without_a_template_is_an_error_before_it_is_loaded(trained: Path) -> None:
    result = CliRunner().invoke(main, ["chat", str(trained)])
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr


class Terminal:
    """A command on a pseudo terminal."""

    def __init__(self, *arguments: str | Path) -> None:
        self.seen = ""
        child, self._end = pty.fork()
        if child == 0:
            os.execv(sys.executable, [sys.executable, "-c", PROGRAM, *map(str, arguments)])
        self.process = child

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Return what was shown since the last call, up to a pattern."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self._end], [], [], 1)[0]:
                self.seen += os.read(self._end, 4096).decode(errors="replace")
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def status(self) -> int:
        with_status = os.waitpid(self.process, 0)[1]
        return os.waitstatus_to_exitcode(with_status)


@contextmanager
def terminal(*arguments: str | Path) -> Iterator[Terminal]:
    made = Terminal(*arguments)
    try:
        yield made
    finally:
        os.close(made._end)


@thorough(PROCESSES)
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_interrupt_stops_the_answer_and_not_the_program(ranks: str, talker: Path) -> None:
    given = ("--backend", "cpu", "--temperature", "1", "--seed", "3", "--tensor-parallel", ranks)
    with terminal("chat", talker, *given) as screen:
        screen.wait_for("> $")
        screen.type("one\n")
        screen.wait_for("one\r\n.*\\S")
        screen.type("\x03")
        assert "stopped" in screen.wait_for(r"tokens/s, stopped\]")
        screen.wait_for("> $")
        screen.type("/system be brief\n")
        screen.wait_for("> $")
        screen.type("\x03")  # There is nothing to stop.
        screen.type("/exit\n")
        assert screen.status() == 0


@thorough(AGAIN)
def test_switches_and_tools_reach_the_template(talker: Path, tmp_path: Path) -> None:
    options = ("generate", talker, "--backend", "cpu", "--chat", "--prompt", "one", "--max-new-tokens", "6")
    with hal.LLM(talker, backend="cpu") as llm:
        tools = [{"type": "function", "function": {"name": "now"}}]
        message = [{"role": "user", "content": "one"}]
        (expected,) = llm.chat(message, tools=tools, shout=True, max_new_tokens=6)
        (plain,) = llm.chat(message, max_new_tokens=6)
        assert expected.prompt_token_ids != plain.prompt_token_ids
    write_json(tmp_path / "tools.json", tools)  # type: ignore[arg-type]
    assert run(*options, "--switch", "shout=true", "--tools", tmp_path / "tools.json").stdout == expected.text + "\n"
    assert run(*options).stdout == plain.text + "\n"
    for given, problem in (
        (("--switch", "nonsense=1"), "has no switch 'nonsense'"),
        (("--switch", "shout"), "give each variable once, as NAME=VALUE"),
        (("--switch", "tools=1"), "give each variable once, as NAME=VALUE"),
        (("--tools", str(tmp_path / "none.json")), "none.json cannot be read"),
    ):
        result = CliRunner().invoke(main, [*map(str, options), *given])
        assert result.exit_code == 2
        assert problem in result.stderr


def test_json_has_log_probabilities(trained: Path) -> None:
    options = ("generate", trained, "--backend", "cpu", "--prompt", "import os\n", "--max-new-tokens", "4", "--json")
    found = json.loads(run(*options, "--logprobs", "2").stdout)
    with hal.LLM(trained, backend="cpu") as llm:
        (expected,) = llm.generate("import os\n", max_new_tokens=4, logprobs=2)
    assert expected.logprobs is not None
    for each, likely in zip(found["logprobs"], expected.logprobs, strict=True):
        assert each == {"logprob": likely.logprob, "top": [list(pair) for pair in likely.top]}
    assert "logprobs" not in json.loads(run(*options).stdout)


def test_generate_takes_messages(talker: Path) -> None:
    result = run("generate", talker, "--backend", "cpu", "--chat", "--prompt", "one", "--max-new-tokens", "6")
    assert result.stdout == answers(talker, [("user", "one")], max_new_tokens=6)[0] + "\n"


@thorough(AGAIN)
@pytest.mark.shows("stop texts", "the command")
def test_generate_stops_at_a_text(repository: Path) -> None:
    checkpoint = repository / "checkpoints" / "tiny-python"
    options = (
        "generate",
        checkpoint,
        "--backend",
        "cpu",
        "--prompt",
        "import os\n",
        "--max-new-tokens",
        "20",
        "--json",
    )
    whole = json.loads(run(*options).stdout)
    cut = json.loads(run(*options, "--stop", "os\n", "--stop", "never").stdout)
    assert cut["text"] == whole["text"].split("os\n")[0]
    assert cut["finished"] == "stop"
    pieces = [json.loads(line) for line in run(*options, "--stop", "os\n", "--stream").stdout.splitlines()]
    assert len(pieces) == len(cut["token_ids"]) > 1
    assert "".join(each["text"] for each in pieces) == cut["text"]
    assert [each["finished"] for each in pieces] == [None] * (len(pieces) - 1) + ["stop"]


@thorough(AGAIN)
@pytest.mark.shows("sampling as the checkpoint recommends", "the command")
def test_generate_samples_as_the_checkpoint_recommends(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "qwen3")
    options = ("--prompt", "the cat", "--max-new-tokens", "9", "--backend", "cpu")
    plain = run("generate", folder, *options).stdout
    explicit = run("generate", folder, *options, "--temperature", "0.9", "--top-k", "7", "--seed", "5").stdout
    write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.9, "top_k": 7})
    assert run("generate", folder, *options, "--seed", "5").stdout == explicit != plain
    assert run("generate", folder, *options, "--greedy").stdout == plain
    assert run("generate", folder, *options).stderr.startswith("seed ")
    assert "recommends temperature 0.9, top_k 7" in run("-v", "generate", folder, *options).stderr
    result = CliRunner().invoke(main, ["generate", str(folder), *options, "--greedy", "--temperature", "2"])
    assert "--greedy and --temperature 2 exclude each other" in result.stderr
