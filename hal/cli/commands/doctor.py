"""``hal doctor``: check this installation and the devices of its drivers."""

from __future__ import annotations

import json
import os

import click

from hal.cli.config_options import EMULATE, Seconds, emulated, tensor_parallel
from hal.cli.console import print_table
from hal.cli.stdout import ResultCommand, echo

TIMEOUT = "Seconds that the examination of each driver may take."
TOTAL_TIMEOUT = "Seconds that the whole examination may take.  [default: 3 times --timeout]"

RANKS = "Also start N ranks of each driver that works, and check and time their collectives."


@click.command("doctor", cls=ResultCommand)
@click.option("--backend", metavar="NAME", help="Examine only this driver; see `hal backends`.")
@click.option("--emulate", is_flag=True, help=EMULATE)
@click.option("--json", "as_document", is_flag=True, help="Print one JSON document, for bug reports.")
@click.option("--timeout", type=Seconds(), default=120, show_default=True, help=TIMEOUT)
@tensor_parallel(RANKS)
@click.option("--total-timeout", type=Seconds(), help=TOTAL_TIMEOUT)
@click.pass_context
def command(
    context: click.Context,
    backend: str | None,
    emulate: bool,
    as_document: bool,
    timeout: float,
    tensor_parallel: int | None,
    total_timeout: float | None,
) -> None:
    """Examine this installation.

    Compares versions, probes every installed driver, and computes, captures, copies and launches on the devices of each
    available driver. Each driver is examined in a separate process, one after another, within --timeout and
    --total-timeout. Exits with 1 if an available driver does not work, if the driver named by --backend is not
    available, or if the time ran out.

    With --tensor-parallel, it also starts ranks of each driver that works. They join each other, and all reduce, gather
    and scatter tensors. A rank that does not come within --timeout is named.
    """
    from hal.device.host_capacity import check_ranks

    # These modules do not import torch or a vendor's package; only the child processes do, and they may crash.
    from hal.doctor import doctor_report
    from hal.doctor.examine import examine, summary
    from hal.doctor.findings import as_json

    check_ranks(tensor_parallel or 1)
    if emulate:
        backend = backend or os.environ.get("HAL_BACKEND")
    with emulated(emulate, backend) as options:
        total = 3 * timeout if total_timeout is None else total_timeout
        found = examine(
            backend,
            options,
            timeout,
            total,
            say=lambda text: click.echo(f"{text} ...", err=True),
            ranks=tensor_parallel or 1,
        )
    if as_document:
        echo(json.dumps(as_json(found), indent=1))
        context.exit(0 if found.ok else 1)
    echo("\n".join(doctor_report.heading(found)) + "\n")
    print_table(*doctor_report.packages(found))
    echo()
    print_table(*doctor_report.drivers(found))
    for title, table in (*doctor_report.devices(found), *doctor_report.ranks(found)):
        echo(f"\n{title}")
        print_table(*table)
    for driver in found.drivers:
        if lines := doctor_report.logs(driver):
            echo("\n" + "\n".join(lines))
    echo(f"\n{summary(found)}")
    context.exit(0 if found.ok else 1)
