"""Tests for commands that packages contribute to ``hal`` with entry points."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers.distributions import install

from hal.cli import main
from hal.cli.commands import bench
from hal.cli.console import OTHER_TOOLS

MODULE = """
import click

@click.command()
@click.argument("name")
def greet(name):
    '''Greet NAME.'''
    click.echo(f"hello, {name}")

@click.command()
def noisy():
    '''Warn.'''
    import logging, warnings
    for _ in range(6):
        logging.getLogger("hal.checkpoint").warning("config.json has keys")
        warnings.warn("torch_library is deprecated")

no_command = 3
"""

ENTRIES = """
[hal.commands]
greet = acme_commands:greet
generate = acme_commands:greet
wrong = acme_commands:no_command
noisy = acme_commands:noisy
absent = acme_missing:greet
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that contributes valid and invalid commands."""
    (tmp_path / "acme_commands.py").write_text(MODULE)
    install(tmp_path, "acme-commands", ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_commands", raising=False)


def test_a_contributed_command_runs() -> None:
    result = CliRunner().invoke(main, ["greet", "Ada"])
    assert (result.exit_code, result.stdout) == (0, "hello, Ada\n")


def test_the_help_lists_it_and_says_which_are_broken() -> None:
    shown = " ".join(CliRunner().invoke(main, ["--help"], terminal_width=200).stdout.split())
    assert "greet Greet NAME." in shown
    assert "absent (cannot be imported: ModuleNotFoundError" in shown
    assert "wrong (is 3, no click.Command)" in shown
    assert "generate Continue prompts" in shown


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent", "the command absent cannot be imported: ModuleNotFoundError: No module named 'acme_missing'"),
        ("wrong", "the command wrong is 3, no click.Command"),
    ],
)
def test_a_broken_one_is_an_error_of_its_own(name: str, problem: str) -> None:
    result = CliRunner().invoke(main, [name, "--any", "argument"])
    assert result.exit_code == 2
    assert problem in result.stderr
    assert re.search(r"remedy: .*update acme-commands 1\.0", result.stderr)


def test_hals_own_commands_cannot_be_replaced() -> None:
    assert "hello" not in CliRunner().invoke(main, ["generate", "Ada"]).stdout


def test_a_warning_is_printed_once() -> None:
    for _ in range(2):  # each command begins anew
        assert CliRunner().invoke(main, ["noisy"]).stderr == "warning: config.json has keys\n"


@pytest.mark.filterwarnings("always")  # by default, Python shows one of a place per process
def test_what_libraries_warn_of_is_printed_once_at_the_debug_level() -> None:
    assert "deprecated" not in CliRunner().invoke(main, ["-v", "noisy"]).stderr
    assert CliRunner().invoke(main, ["-vv", "noisy"]).stderr.count("UserWarning: torch_library is deprecated") == 1


def test_a_command_that_nobody_has() -> None:
    result = CliRunner().invoke(main, ["greetings"])
    assert result.exit_code == 2
    assert "No such command 'greetings'. Did you mean 'greet'?" in result.stderr
    assert "The commands are " in CliRunner().invoke(main, ["qqq"]).stderr


@pytest.mark.parametrize(("given", "named"), [("run", "'hal generate MODEL"), ("version", "'hal --version'")])
def test_a_command_of_other_tools(given: str, named: str) -> None:
    result = CliRunner().invoke(main, [given, "anything"])
    assert result.exit_code == 2
    assert f"No such command '{given}'. Use {named}" in result.stderr


def test_other_tools_commands_name_commands_of_hal() -> None:
    """A name here is no command of hal, and each command of hal that it names exists."""
    assert not OTHER_TOOLS.keys() & main.commands.keys()  # type: ignore[attr-defined]
    named = re.findall(r"'hal ([a-z]+)", " ".join(OTHER_TOOLS.values()))
    assert named
    assert set(named) <= main.commands.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("names", [[], ["bench"], ["bench", "decode"], ["greet"]])
def test_help_is_the_option_help(names: list[str]) -> None:
    run = CliRunner().invoke
    assert run(main, ["help", *names]).stdout == run(main, [*names, "--help"]).stdout != ""


@pytest.mark.parametrize("before", ["help", "nothing"])
def test_a_shell_completes_after_no_command(before: str) -> None:
    typed = {"_HAL_COMPLETE": "bash_complete", "COMP_WORDS": f"hal {before} gener", "COMP_CWORD": "2"}
    result = CliRunner().invoke(main, env=typed, prog_name="hal")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "plain,generate\n", "")


def test_help_of_no_command() -> None:
    result = CliRunner().invoke(main, ["help", "generete"])
    assert result.exit_code == 2
    assert "Did you mean 'generate'?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["Qwen/Qwen3-0.6B"], ("hal generate Qwen/Qwen3-0.6B", "hal chat Qwen/Qwen3-0.6B", "hal serve Qwen")),
        (["bench", "a/folder"], ("hal bench decode a/folder", "hal bench prefill a/folder")),
    ],
)
def test_a_checkpoint_in_place_of_a_command(arguments: list[str], suggested: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, arguments, prog_name="hal")
    assert result.exit_code == 2
    assert all(each in result.stderr for each in suggested), result.stderr


def test_a_prompt_without_its_option() -> None:
    result = CliRunner().invoke(main, ["generate", "a/folder", "Hello"])
    assert result.exit_code == 2
    assert "(Hello). A prompt needs --prompt" in result.stderr


def test_the_modules_of_others_are_not_imported_for_hals_own_commands() -> None:
    CliRunner().invoke(main, ["backends"])
    assert "acme_commands" not in sys.modules


def test_own_commands_have_their_names() -> None:
    """The reference page's headings are these names; click would otherwise take a function's."""
    own = main.commands  # type: ignore[attr-defined]
    assert {name: each.name for name, each in own.items()} == {name: name for name in own}
    assert {"generate", "new-driver"} <= set(own)


def _options() -> list[tuple[str, click.Option]]:
    """Return the options of hal's own commands, with each command's name."""
    commands = [*main.commands.items(), *bench.command.commands.items()]
    return [(name, each) for name, command in commands for each in command.params if isinstance(each, click.Option)]


def test_commands_that_run_models_have_all_options_of_the_configuration() -> None:
    wanted = {"--backend", "--dtype", "--emulate", "--compiler", "--compilation-config", "--model-source"}
    names = ("generate", "chat", "serve", "explain", "compare", "decode", "prefill")
    for name in names:
        assert wanted <= {each for command, option in _options() if command == name for each in option.opts}, name


def test_an_option_has_one_spelling_and_one_kind() -> None:
    """An option that several commands take is spelled alike, and is a flag in all of them or in none."""
    spelled: dict[str, set[str]] = {}
    kinds: dict[str, set[bool]] = {}
    for _, option in _options():
        for spelling in option.opts:
            spelled.setdefault(spelling.removesuffix("s"), set()).add(spelling)
            kinds.setdefault(spelling, set()).add(option.is_flag)
    assert {"--backend", "--compiler", "--dtype", "--batch-size", "--json"} <= set(kinds)
    assert [each for each in spelled.values() if len(each) > 1] == [], "no option is another's plural"
    assert [spelling for spelling, each in kinds.items() if len(each) > 1] == []


@pytest.mark.parametrize("name", ["--backend", "--compiler", "--dtype", "--max-new-tokens"])
def test_an_option_of_one_value_is_not_dropped(name: str) -> None:
    result = CliRunner().invoke(main, ["generate", "nowhere", name, "1", name, "2"])
    assert result.exit_code == 2
    assert f"Option '{name}' takes one value, and is given more than once." in result.stderr
