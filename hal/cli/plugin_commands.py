"""Commands that other packages contribute, through the entry-point group ``hal.commands``."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import click

from hal.cli.console import Commands
from hal.errors import DriverError

GROUP = "hal.commands"


class ContributedCommands(Commands):
    """hal's own commands, and those of installed packages, which are loaded when they are run or shown in the help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command's name. Imports none."""
        return sorted({*super().list_commands(ctx), *(each.name for each in _entries())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; hal's own cannot be replaced. One that cannot be loaded says so when it is run."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for entry in _entries().select(name=cmd_name):
            return _load(entry)
        return None


def _entries() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=GROUP)


def _load(entry: importlib.metadata.EntryPoint) -> click.Command:
    # As in the registry, a vendor's broken package must not take the other commands down with it.
    try:
        loaded: Any = entry.load()
    except (Exception, SystemExit) as error:
        return _broken(entry, f"it raised {error!r}")
    return loaded if isinstance(loaded, click.Command) else _broken(entry, f"it is {loaded!r}, no click.Command")


def _broken(entry: importlib.metadata.EntryPoint, problem: str) -> click.Command:
    package = entry.dist.name if entry.dist else "the package that brings it"

    @click.command(
        entry.name,
        short_help=f"(cannot be loaded: {problem})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> None:
        raise DriverError(
            f"the command {entry.name} of {package} cannot be loaded: {problem}", f"reinstall or update {package}"
        )

    return command
