"""``hal ops``: the coverage of operations by drivers' kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import click

from hal.cli.console import print_table
from hal.cli.stdout import ResultCommand, echo
from hal.errors import DriverUnavailable, HalError

if TYPE_CHECKING:
    from hal.drivers.backend import Backend
    from hal.drivers.registry import Candidate
    from hal.ops import Operation

LEGEND = """
kernel     the driver's kernel; where it selects among libraries, the library is in brackets
composed   no kernel for the whole operation: its parts run, each with the driver's kernel if it has one
reference  no kernel: the operation's body runs"""


@click.command("ops", cls=ResultCommand)
def command() -> None:
    """Show which operations each driver has kernels for.

    Opens every available driver to read its kernels.
    """
    from hal.drivers.registry import candidates
    from hal.ops import catalogue

    opened = [(each.name, _open(each)) for each in candidates()]
    operations = [operation for _, operation in sorted(catalogue().items())]  # opened drivers may add operations
    rows = [(each.name, *(_cell(each, found) for _, found in opened)) for each in operations]
    heads = (f"{name} ({found.state})" if isinstance(found, _Closed) else name for name, found in opened)
    print_table(("operation", *heads), rows)
    echo(LEGEND)
    for name, found in opened:
        if isinstance(found, _Closed):
            echo(f"\n{name} is {found.state}: {found.why}")


@attrs.frozen
class _Closed:
    """A driver that is not open: ``unavailable`` or ``broken``, and why."""

    state: str
    why: str


def _open(candidate: Candidate) -> Backend | _Closed:
    """Open the candidate's backend, or return why it is closed."""
    from hal.config import environment_options
    from hal.drivers.opening import open_driver

    if candidate.driver is None or not candidate.probe.available:
        state = "broken" if candidate.driver is None else "unavailable"
        return _Closed(state, f"{candidate.probe.reason}\n  remedy: {candidate.probe.hint}")
    try:
        return open_driver(candidate.driver, environment_options(candidate.name))
    except HalError as error:  # one failure must not hide the other drivers
        return _Closed(
            "unavailable" if isinstance(error, DriverUnavailable) else "broken", f"opening it failed: {error}"
        )


def _cell(operation: Operation, found: Backend | _Closed) -> str:
    if isinstance(found, _Closed):
        return "-"
    if operation.name in found.kernels:
        source = found.sources.get(operation.name)
        return f"kernel ({source})" if source else "kernel"
    return "composed" if operation.fused else "reference"
