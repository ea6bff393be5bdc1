"""The ``hal`` command: generate text, list the installed drivers, show which operations they have kernels for.

``main`` is the console script. Each command is a module of its own, and imports what is heavy when it runs.
"""

from __future__ import annotations

import click

from hal.cli import backends, generate, operations
from hal.cli.console import Commands, logging_to_stderr
from hal.version import __version__


@click.group(cls=Commands)
@click.option("-v", "--verbose", is_flag=True, help="Log what hal does, not only what it warns of.")
@click.version_option(__version__, prog_name="hal", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context, verbose: bool) -> None:
    """Run language models on whatever hardware has a driver."""
    context.with_resource(logging_to_stderr("INFO" if verbose else "WARNING"))


main.add_command(generate.command, "generate")
main.add_command(backends.command, "backends")
main.add_command(operations.command, "ops")
