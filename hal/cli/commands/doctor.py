"""``hal doctor``: what is installed here, whether it fits together, and whether each driver's devices compute."""

from __future__ import annotations

import json
import os

import click

from hal.cli.console import print_table
from hal.cli.emulation import EMULATE, emulated
from hal.cli.stdout import ResultCommand, echo

TIMEOUT = "Seconds that the examination of a driver may take."
TOTAL_TIMEOUT = "Seconds that all of it may take; three times --timeout by default."


@click.command(cls=ResultCommand)
@click.option("--backend", metavar="NAME", help="Examine this driver alone; see `hal backends`.")
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--json", "as_document", is_flag=True, help="Print one JSON document, for bug reports.")
@click.option("--timeout", type=click.FloatRange(min=1), default=120, show_default=True, help=TIMEOUT)
@click.option("--total-timeout", type=click.FloatRange(min=1), help=TOTAL_TIMEOUT)
@click.pass_context
def command(
    context: click.Context,
    backend: str | None,
    emulate: bool,
    as_document: bool,
    timeout: float,
    total_timeout: float | None,
) -> None:
    """Examine this installation.

    Compares versions, probes every installed driver, and computes, captures, copies and launches on the devices of each
    that can run here. Each driver is examined in a process of its own, side by side, and at most so long as --timeout
    and --total-timeout say. Exits with 1 if anything that is available does not work, if the driver that --backend
    names cannot run here, or if not all could be examined in time.
    """
    # None of these imports torch: what its import does, or a vendor's package, is for processes that may crash.
    from hal.doctor import doctor_report
    from hal.doctor.examine import examine, summary
    from hal.doctor.findings import as_json

    if emulate:
        backend = backend or os.environ.get("HAL_BACKEND")
    with emulated(emulate, backend) as options:
        total = 3 * timeout if total_timeout is None else total_timeout
        found = examine(backend, options, timeout, total, say=lambda text: click.echo(f"{text} ...", err=True))
    if as_document:
        echo(json.dumps(as_json(found), indent=1))
        context.exit(0 if found.ok else 1)
    echo("\n".join(doctor_report.heading(found)) + "\n")
    print_table(*doctor_report.packages(found))
    echo()
    print_table(*doctor_report.drivers(found))
    for title, table in doctor_report.devices(found):
        echo(f"\n{title}")
        print_table(*table)
    for driver in found.drivers:
        if lines := doctor_report.logs(driver):
            echo("\n" + "\n".join(lines))
    echo(f"\n{summary(found)}")
    context.exit(0 if found.ok else 1)
