"""The ``hal`` command: generate text, converse, serve, measure, compare, quantize, and inspect drivers and operations.

``main`` is the console script. Each command is a module and imports heavy packages only when it runs. Installed
packages contribute commands through the entry-point group ``hal.commands``.
"""

from __future__ import annotations

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
from hal.cli.console import logging_to_stderr
from hal.cli.plugin_commands import ContributedCommands
from hal.version import __version__


@click.group(cls=ContributedCommands)
@click.option("-v", "--verbose", count=True, help="Log progress as well as warnings; -vv logs what libraries warn of.")
@click.version_option(__version__, prog_name="hal", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context, verbose: int) -> None:
    """Run language models on any hardware with a driver."""
    context.with_resource(logging_to_stderr(("WARNING", "INFO", "DEBUG")[min(verbose, 2)]))


main.add_command(generate.command)
main.add_command(chat.command)
main.add_command(serve.command)
main.add_command(bench.command)
main.add_command(bringup.command)
main.add_command(compare.command)
main.add_command(quantize.command)
main.add_command(backends.command)
main.add_command(doctor.command)
main.add_command(new_driver.command)
main.add_command(explain.command)
main.add_command(ops.command)
