"""``hal backends``: list the installed drivers and their availability."""

from __future__ import annotations

import json

import click

from hal.cli.config_options import EMULATE_EACH, probed
from hal.cli.console import print_table
from hal.cli.stdout import ResultCommand, echo


@click.command("backends", cls=ResultCommand)
@click.option("--emulate", is_flag=True, help=EMULATE_EACH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(emulate: bool, as_json: bool) -> None:
    """List the installed drivers.

    Prints whether each is available, and if not, why and what to do. An asterisk marks the driver that "auto" selects.
    With --emulate, a driver with an emulator is available if it can emulate its device; "auto" never does.

    With --json, the key auto has the name of that driver, or null. The key drivers has an object for each, with the
    keys name, available, priority, api_version, reason and hint.
    """
    from hal.drivers.registry import candidates

    tried = [each for each, _ in probed(emulate)]
    plain = candidates() if emulate else tried
    chosen = next((each.name for each in plain if each.probe.available), None)
    drivers = [
        {
            "name": each.name,
            "available": each.probe.available,
            "priority": each.driver.priority if each.driver else None,
            "api_version": ".".join(map(str, each.driver.api_version)) if each.driver else None,
            "reason": str(each.probe.reason),
            "hint": str(each.probe.hint),
        }
        for each in tried
    ]
    if as_json:
        echo(json.dumps({"auto": chosen, "drivers": drivers}, indent=1))
        return
    rows = [
        (
            f"{each['name']} *" if each["name"] == chosen else str(each["name"]),
            "yes" if each["available"] else "no",
            *("-" if each[key] is None else str(each[key]) for key in ("priority", "api_version")),
            str(each["reason"]),
        )
        for each in drivers
    ]
    print_table(("driver", "available", "priority", "API", "why"), rows)
    for each in drivers:
        if each["hint"]:
            echo(f"\n{each['name']}: {each['hint']}")
    echo(f"\n* selected by auto: {chosen}" if chosen else "\nauto finds no available driver")
