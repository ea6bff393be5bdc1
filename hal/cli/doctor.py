"""``hal doctor``: what is installed here, whether it fits together, and whether each driver's devices compute."""

from __future__ import annotations

import json
import os

import click

from hal.cli.console import print_table
from hal.cli.emulation import EMULATE, emulated

TIMEOUT = "Seconds that the examination of a driver may take."


@click.command()
@click.option("--backend", metavar="NAME", help="Examine this driver alone; see `hal backends`.")
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--json", "as_document", is_flag=True, help="Print one JSON document, for bug reports.")
@click.option("--timeout", type=click.FloatRange(min=1), default=120, show_default=True, help=TIMEOUT)
@click.pass_context
def command(context: click.Context, backend: str | None, emulate: bool, as_document: bool, timeout: float) -> None:
    """Examine this installation.

    Compares versions, probes every installed driver, and computes, captures, copies and launches on the devices of each
    that can run here. Each driver is examined in a process of its own. Exits with 1 if anything that is available does
    not work, or if the driver that --backend names cannot run here.
    """
    # None of these imports torch: what its import does, or a vendor's package, is for processes that may crash.
    from hal.doctor import report
    from hal.doctor.examine import examine, summary
    from hal.doctor.findings import as_json

    if emulate:
        backend = backend or os.environ.get("HAL_BACKEND")
    with emulated(emulate, backend) as options:
        found = examine(backend, options, timeout, say=lambda text: click.echo(f"{text} ...", err=True))
    if as_document:
        click.echo(json.dumps(as_json(found), indent=1))
        context.exit(0 if found.ok else 1)
    click.echo("\n".join(report.heading(found)) + "\n")
    print_table(*report.packages(found))
    click.echo()
    print_table(*report.drivers(found))
    for title, table in report.devices(found):
        click.echo(f"\n{title}")
        print_table(*table)
    for driver in found.drivers:
        if lines := report.logs(driver):
            click.echo("\n" + "\n".join(lines))
    click.echo(f"\n{summary(found)}")
    context.exit(0 if found.ok else 1)
