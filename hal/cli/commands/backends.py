"""``hal backends``: every installed driver, and whether it can run here."""

from __future__ import annotations

import click

from hal.cli.console import print_table
from hal.cli.stdout import ResultCommand, echo


@click.command(cls=ResultCommand)
def command() -> None:
    """List the installed drivers.

    Says of each whether it can run here; if not, why, and what to do. An asterisk marks the one that the backend "auto"
    takes.
    """
    from hal.drivers.registry import candidates

    tried = candidates()
    chosen = next((each.name for each in tried if each.probe.available), None)
    rows = []
    for each in tried:
        driver, probe = each.driver, each.probe
        rows.append(
            (
                f"{each.name} *" if each.name == chosen else each.name,
                "yes" if probe.available else "no",
                str(driver.priority) if driver else "-",
                ".".join(map(str, driver.api_version)) if driver else "-",
                str(probe.reason),
                str(probe.hint),
            )
        )
    print_table(("driver", "available", "priority", "API", "why", "what to do"), rows)
    echo(f"\n* what auto takes: {chosen}" if chosen else "\nauto finds no driver that can run here")
