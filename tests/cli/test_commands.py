"""Tests for commands that packages contribute to ``hal`` with entry points."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.distributions import install

from hal.cli import main

MODULE = """
import click

@click.command()
@click.argument("name")
def greet(name):
    '''Greet NAME.'''
    click.echo(f"hello, {name}")

no_command = 3
"""

ENTRIES = """
[hal.commands]
greet = acme_commands:greet
generate = acme_commands:greet
wrong = acme_commands:no_command
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


def test_a_command_that_nobody_has() -> None:
    result = CliRunner().invoke(main, ["greetings"])
    assert result.exit_code == 2
    assert "No such command 'greetings'" in result.stderr


def test_the_modules_of_others_are_not_imported_for_hals_own_commands() -> None:
    CliRunner().invoke(main, ["backends"])
    assert "acme_commands" not in sys.modules


def test_own_commands_have_their_names() -> None:
    """The reference page's headings are these names; click would otherwise take a function's."""
    own = main.commands  # type: ignore[attr-defined]
    assert {name: each.name for name, each in own.items()} == {name: name for name in own}
    assert {"generate", "new-driver"} <= set(own)
