"""``hal ops``: the coverage of operations by drivers' kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from hal.cli.config_options import EMULATE_EACH, has_no_emulator, probed
from hal.cli.console import print_table
from hal.cli.stdout import ResultCommand, echo
from hal.errors import ConfigError, DriverUnavailable, HalError

if TYPE_CHECKING:
    from hal.drivers.backend import Backend
    from hal.drivers.registry import Candidate
    from hal.ops import Operation

LEGEND = """
kernel     the driver's kernel; where it selects among libraries, the library is in brackets; calls with an option that
           it is without run another kernel, or the operation's body
composed   no kernel for the whole operation: its parts run, each with the driver's kernel if it has one
reference  no kernel: the operation's body runs"""


@click.command("ops", cls=ResultCommand)
@click.option("--backend", metavar="NAME", help="Show only this driver; see `hal backends`.")
@click.option("--emulate", is_flag=True, help=EMULATE_EACH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(backend: str | None, emulate: bool, as_json: bool) -> None:
    """Show which operations each driver has kernels for.

    Opens every available driver to read its kernels.

    With --json, the key drivers has an object for each driver, with the keys name, state (open, unavailable or broken)
    and why. The key operations has an object for each operation, with the keys name, fused and drivers: what runs, for
    each driver, or null.
    """
    from hal.ops import catalogue

    opened = [(each.name, _open(each, options)) for each, options in probed(emulate, backend)]
    operations = [operation for _, operation in sorted(catalogue().items())]  # opened drivers may add operations
    if as_json:
        echo(json.dumps(_as_json(opened, operations), indent=1))
        return
    rows = [(each.name, *(_cell(each, found) or "-" for _, found in opened)) for each in operations]
    heads = (f"{name} ({found.state})" if isinstance(found, _Closed) else name for name, found in opened)
    print_table(("operation", *heads), rows)
    echo(LEGEND)
    for name, found in opened:
        if isinstance(found, _Closed):
            echo(f"\n{name} is {found.state}: {found.why}")


def _as_json(opened: Sequence[tuple[str, Backend | _Closed]], operations: Sequence[Operation]) -> dict[str, Any]:
    states = [(name, found if isinstance(found, _Closed) else _Closed("open", "")) for name, found in opened]
    return {
        "drivers": [{"name": name, "state": found.state, "why": found.why} for name, found in states],
        "operations": [
            {"name": each.name, "fused": each.fused, "drivers": {name: _cell(each, found) for name, found in opened}}
            for each in operations
        ],
    }


@attrs.frozen
class _Closed:
    """A driver that is not open: ``unavailable`` or ``broken``, and why."""

    state: str
    why: str


def _open(candidate: Candidate, options: dict[str, Any]) -> Backend | _Closed:
    """Open the candidate's backend, or return why it is closed."""
    from hal.drivers.opening import open_driver

    if candidate.driver is None or not candidate.probe.available:
        state = "broken" if candidate.driver is None else "unavailable"
        return _Closed(state, f"{candidate.probe.reason}\n  remedy: {candidate.probe.hint}")
    try:
        try:
            return open_driver(candidate.driver, options)
        except ConfigError as error:
            if not has_no_emulator(error):
                raise
            return open_driver(candidate.driver, {key: value for key, value in options.items() if key != "emulator"})
    except HalError as error:  # one failure must not hide the other drivers
        return _Closed(
            "unavailable" if isinstance(error, DriverUnavailable) else "broken", f"opening it failed: {error}"
        )


def _cell(operation: Operation, found: Backend | _Closed) -> str | None:
    if isinstance(found, _Closed):
        return None
    from hal.ops.kernels.partial_kernel import FormKernels, PartialKernel

    if operation.name in found.kernels:
        source, kernel = found.sources.get(operation.name), found.kernels[operation.name]
        lacks = kernel.lacks if isinstance(kernel, PartialKernel | FormKernels) else ()
        return "kernel" + (f" ({source})" if source else "") + (f" without {', '.join(lacks)}" if lacks else "")
    return "composed" if operation.fused else "reference"
