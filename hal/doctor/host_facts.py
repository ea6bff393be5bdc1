"""Facts about the host, before any driver is imported: Python, torch, packages, variables, installed drivers."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs
from packaging.requirements import InvalidRequirement, Requirement

from hal.config.child_process import ChildProcess
from hal.config.optional_libraries import DISTRIBUTION, optional_requirements
from hal.config.plugins import registered
from hal.config.process_keeper import ProcessKeeper
from hal.doctor import findings
from hal.errors import DriverNotFound, nearest

DRIVERS = "hal.drivers"
ISOLATED = ("-P", "-X", "faulthandler")
"""Options of Python for a process that is examined: the current folder is not on its path."""
TORCH_FACTS = Path(__file__).with_name("torch_facts.py")
"""A program that Python runs without importing hal."""
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
VISIBLE = "_VISIBLE_DEVICES"
"""Suffix of the variables with which vendors' runtimes hide devices."""


def installed_drivers(only: str | None) -> list[findings.Driver]:
    """Return all installed drivers, or the one called ``only``, without importing them.

    Raises:
        DriverNotFound: no driver has that name.
    """
    found: dict[str, findings.Driver] = {}
    for each in registered(DRIVERS):
        found.setdefault(each.name, findings.Driver(each.name, each.target, each.package, each.version))
    if only is not None and only not in found:
        raise DriverNotFound(f"no driver {only!r} is installed", nearest(only, found))
    return [each for name, each in sorted(found.items()) if only in (None, name)]


def torch_found(seconds: float) -> findings.Torch:
    """Return the installed torch, and whether ``import torch`` works without hal, within ``seconds``."""
    facts, problem = _import_torch(seconds, os.environ)
    if not problem:
        return facts
    facts, alone = _import_torch(seconds, {**os.environ, AUTOLOAD: "0"})
    if alone:
        return attrs.evolve(facts, imports=False, problem=alone, remedy="reinstall torch")
    return attrs.evolve(
        facts,
        imports=False,
        problem=f"`import torch` fails without hal, because it imports a vendor's package that fails: {problem}",
        remedy=f"set {AUTOLOAD}=0, or import hal before torch; programs that import the package themselves, as "
        "transformers does, need the vendor's runtime, or an environment without the package",
    )


def _import_torch(seconds: float, environ: Mapping[str, str]) -> tuple[findings.Torch, str]:
    with ProcessKeeper(environ) as keeper:
        file = keeper.folder / "facts.json"
        process = ChildProcess([*ISOLATED, str(TORCH_FACTS), str(file)], keeper)
        process.wait(seconds)
        ending = process.end(seconds)
        if ending.code == 0:
            keeper.ended()
            if file.exists():
                return findings.Torch(**json.loads(file.read_text(encoding="utf-8"))), ""
    last_line = next((line for line in reversed(ending.log) if line.strip()), "")
    return findings.Torch(), f"{ending}: {last_line}" if last_line else str(ending)


def packages(drivers: Iterable[findings.Driver]) -> list[findings.Package]:
    """Return the packages that hal, the drivers and hal's extras require, with the installed versions."""
    try:
        own = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # hal runs from source
        own = []
    needed = [(DISTRIBUTION, each) for each in own]
    needed += [(each.name, requirement) for each in drivers for requirement in each.requires]
    found = [package for by, requirement in needed for package in _package(by, requirement)]
    return found + [
        package
        for extra, requirement in optional_requirements()
        for package in _package(f"{DISTRIBUTION}[{extra}]", f"{requirement.name}{requirement.specifier}")
    ]


def _package(required_by: str, text: str) -> Iterator[findings.Package]:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        yield findings.Package(text, required_by, "invalid requirement", None, False)
        return
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield findings.Package(requirement.name, required_by, str(requirement.specifier), None, False)
        return
    fits = requirement.specifier.contains(found, prereleases=True)
    yield findings.Package(requirement.name, required_by, str(requirement.specifier), found, fits)


def variables(drivers: Iterable[findings.Driver]) -> dict[str, str]:
    """Return the relevant environment variables: hal's, those that hide devices, and those that drivers name."""
    prefixes = ("HAL_", AUTOLOAD, *(prefix for each in drivers for prefix in each.variables if prefix))
    return {
        name: text for name, text in sorted(os.environ.items()) if name.startswith(prefixes) or name.endswith(VISIBLE)
    }
