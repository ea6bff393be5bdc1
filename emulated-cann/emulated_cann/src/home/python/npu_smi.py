"""npu-smi of the emulated NPUs: the queries of `npu-smi info` that programs read, in its layout.

It knows the options of the machine, which `emulated-cann run` and `emulated_cann.activate` put into the environment. It
does not see other processes, so no memory is in use and nothing runs. Power and temperature are not available.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

OPTIONS: dict[str, Any] = json.loads(os.environ.get("EMULATED_CANN_OPTIONS") or "{}")
DEVICES: int = OPTIONS.get("devices", 1)
SOC: str = OPTIONS.get("soc", "Ascend910B3")
VERSION: str = OPTIONS.get("version", "9.1.0")
MEGABYTES: int = OPTIONS.get("memory", 16 << 30) >> 20
HEALTH = "OK"
TYPES = ("board", "health", "memory", "product", "topo", "usages")


def row(*cells: str, widths: tuple[int, ...] = (26, 14, 70), ends: str = "|") -> str:
    """Return a row of a table of three columns."""
    return ends + ends.join(f" {cell:{width}}" for cell, width in zip(cells, widths, strict=True)) + ends


def overview() -> Iterator[str]:
    """Yield the tables of `npu-smi info`."""
    thin, thick = ("+" + "+".join(mark * width for width in (27, 15, 71)) + "+" for mark in "-=")
    yield "+" + "-" * 115 + "+"
    yield row(f"npu-smi {VERSION} (emulated)", f"Version: {VERSION}", widths=(32, 80))
    yield thin
    yield row("NPU   Name", "Health", "Power(W)             Temp(C)                 Hugepages-Usage(page)")
    yield row("Chip", "Bus-Id", "AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)")
    yield thick
    for device in range(DEVICES):
        yield row(f"{device:<5} {SOC.removeprefix('Ascend')}", HEALTH, f"{'-':20} {'-':23} 0    / 0")
        yield row("0", "NA", f"{0:<20} {'0    / 0':23} 0    / {MEGABYTES}")
        yield thick
    columns = "NPU     Chip", "Process id", "Process name", "Process memory(MB)"
    yield row(*columns, widths=(26, 14, 34, 34))
    yield thick
    for device in range(DEVICES):
        yield row(f"No running processes found in NPU {device}", widths=(114,))


def mapping() -> Iterator[str]:
    """Yield the table of `npu-smi info -m`."""
    columns = "NPU ID", "Chip ID", "Chip Logic ID", "Chip Name"
    for cells in (columns, *((str(device), "0", str(device), SOC) for device in range(DEVICES))):
        yield "".join(f"{cell:31}" for cell in cells).rstrip()


def topology() -> Iterator[str]:
    """Yield the table of `npu-smi info -t topo`: all NPUs are near all cores."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    names = [f"NPU{device}" for device in range(DEVICES)]
    yield "".join(f"{cell:11}" for cell in ("", *names, "CPU Affinity")).rstrip()
    for name in names:
        cells = (name, *("X" if name == other else "HCCS" for other in names), cores)
        yield "".join(f"{cell:11}" for cell in cells).rstrip()


def details(kind: str, device: int, chip: int | None) -> dict[str, object]:
    """Return the properties of `npu-smi info -t` of a device or of its chip."""
    name = SOC.removeprefix("Ascend")
    found: dict[str, object] = {"NPU ID": device, **({"Chip Count": 1} if chip is None else {"Chip ID": chip})}
    if kind == "usages":
        rates = {f"{part} Usage Rate(%)": 0 for part in ("HBM", "Aicore", "Aivector", "Aicpu", "Ctrlcpu")}
        return {**found, "HBM Capacity(MB)": MEGABYTES, **rates, "HBM Bandwidth Usage Rate(%)": 0}
    if kind == "memory":
        return {**found, "HBM Capacity(MB)": MEGABYTES}
    if kind == "health":
        return {"Health": HEALTH, **found}
    if kind == "product":
        return {**found, "Product Name": f"{SOC} (emulated)"}
    board = {**found, "Product Name": f"{SOC} (emulated)", "Software Version": VERSION, "Firmware Version": VERSION}
    if SOC.startswith("Ascend950"):
        return {**board, "Chip Name": "Ascend950", "NPU Name": name.removeprefix("950").strip("_") or "NA"}
    if chip is None:
        return board
    if "_" in name:  # A3, such as Ascend910_9391
        chip_name, _, npu_name = SOC.partition("_")
        return {**found, "Chip Name": chip_name, "NPU Name": npu_name}
    return {**found, "Chip Type": "Ascend", "Chip Name": name}


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the program and what is emulated."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 1."""
        self.exit(1, f"npu-smi: {message}; emulated are info [-l | -m | -t {{{','.join(TYPES)}}} [-i ID [-c CHIP]]]\n")


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the answer to a query."""
    if arguments.l:
        yield from pairs({"Total Count": DEVICES})
        for device in range(DEVICES):
            yield ""
            yield from pairs({"NPU ID": device, "Product Name": f"{SOC} (emulated)", "Chip Count": 1})
    elif arguments.m:
        yield from mapping()
    elif arguments.t is None:
        yield from overview()
    elif arguments.t == "topo":
        yield from topology()
    else:
        for device in range(DEVICES) if arguments.i is None else [arguments.i]:
            yield from pairs(details(arguments.t, device, arguments.c))


def pairs(properties: dict[str, object]) -> Iterator[str]:
    """Yield a line for each property."""
    for name, value in properties.items():
        yield f"\t{name:30} : {value}"


def main() -> None:
    """Answer the query of the command line."""
    parser = Parser(prog="npu-smi", add_help=False)
    parser.add_argument("command", choices=["info"])
    parser.add_argument("-l", action="store_true")
    parser.add_argument("-m", action="store_true")
    parser.add_argument("-t", choices=TYPES)
    parser.add_argument("-i", type=int, choices=range(DEVICES))
    parser.add_argument("-c", type=int, choices=[0])
    sys.stdout.write("\n".join(lines(parser.parse_args())) + "\n")


if __name__ == "__main__":
    main()
