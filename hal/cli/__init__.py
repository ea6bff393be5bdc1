"""The ``hal`` command: generate text, converse, serve, measure, compare, quantize, and inspect drivers and operations.

``main`` is the console script. Each command is a module and imports heavy packages only when it runs. Installed
packages contribute commands through the entry-point group ``hal.commands``.
"""

from __future__ import annotations

from typing import Any

import click

from hal.cli.commands import (
    backends,
    bench,
    bringup,
    chat,
    compare,
    doctor,
    explain,
    generate,
    new_driver,
    ops,
    quantize,
    serve,
)
from hal.cli.console import OTHER_TOOLS, Commands, logging_to_stderr
from hal.config.plugins import Plugin, Plugins
from hal.errors import DriverError, HalError
from hal.version import __version__

GROUP = "hal.commands"


def _check(plugin: Plugin, found: Any) -> click.Command:
    if isinstance(found, click.Command):
        return found
    raise DriverError(f"the command {plugin.name} is {found!r:.70}, no click.Command", f"update {plugin.source}")


COMMANDS: Plugins[click.Command] = Plugins(GROUP, "command", _check, error=DriverError)


class ContributedCommands(Commands):
    """hal's commands and those of installed packages, which are imported when they run or appear in the help."""

    takers = ("generate", "chat", "serve")
    known_elsewhere = OTHER_TOOLS

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command's name. Imports none."""
        return sorted({*super().list_commands(ctx), *COMMANDS.names()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name. hal's cannot be replaced; one that cannot be loaded raises when it runs."""
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in COMMANDS.names():
            return own
        try:
            return COMMANDS.load(cmd_name)
        except HalError as error:  # a vendor's broken package must not keep the other commands out of the help
            return _broken(cmd_name, error)


def _broken(name: str, error: HalError) -> click.Command:
    @click.command(
        name,
        short_help=f"({error.problem.removeprefix(f'the command {name} ')})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> None:
        raise error

    return command


@click.group(cls=ContributedCommands)
@click.option("-v", "--verbose", count=True, help="Log progress as well as warnings; -vv logs what libraries warn of.")
@click.version_option(__version__, prog_name="hal", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context, verbose: int) -> None:
    """Run language models on any hardware with a driver."""
    context.with_resource(logging_to_stderr(("WARNING", "INFO", "DEBUG")[min(verbose, 2)]))


for each in (generate, chat, serve, bench, bringup, compare, quantize, backends, doctor, new_driver, explain, ops):
    main.add_command(each.command)
