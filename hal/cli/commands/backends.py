"""``hal backends``: list the installed drivers and their availability."""

from __future__ import annotations

import click

from hal.cli.console import print_table
from hal.cli.stdout import ResultCommand, echo


@click.command("backends", cls=ResultCommand)
def command() -> None:
    """List the installed drivers.

    Prints whether each is available, and if not, why and what to do. An asterisk marks the driver that "auto" selects.
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
    echo(f"\n* selected by auto: {chosen}" if chosen else "\nauto finds no available driver")
