"""What was found, as values. The JSON document of ``hal doctor`` has their attributes as its keys."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import cattrs

SCHEMA = 1
"""Of the JSON document: raised when a key goes or changes its meaning, not when one is added."""

Outcome = Literal["passed", "failed", "skipped"]
Status = Literal["works", "unavailable", "broken"]


@attrs.frozen
class Check:
    """One thing that a device was asked to do.

    Attributes:
        name: of the check.
        outcome: skipped where the backend does not offer it.
        detail: what was done, or what went wrong, or why it was skipped.
        remedy: what to do, if it failed.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    remedy: str = ""


@attrs.frozen
class Measures:
    """How fast a device answers, all medians, and its memory.

    Attributes:
        host_to_device_gb_per_s: 10**9 bytes a second, copied to the device.
        device_to_host_gb_per_s: likewise, back.
        copy_bytes: of one copy.
        pinned: whether the host's memory was page-locked.
        launch_us: microseconds for which the host is busy when it launches one small kernel.
        memory_free_bytes: of the device.
        memory_total_bytes: likewise.
    """

    host_to_device_gb_per_s: float
    device_to_host_gb_per_s: float
    copy_bytes: int
    pinned: bool
    launch_us: float
    memory_free_bytes: int
    memory_total_bytes: int


@attrs.define
class Device:
    """One device of a driver that could be opened.

    Attributes:
        device: torch's name of it.
        name: the product's.
        checks: in the order they were made.
        measures: None if the examination did not come so far.
    """

    device: str
    name: str
    checks: list[Check] = attrs.Factory(list)
    measures: Measures | None = None


@attrs.define
class Driver:
    """One installed driver.

    Attributes:
        name: the entry point's.
        entry_point: module and class.
        package: that brings it, and ``version`` that package's; empty if the metadata does not say.
        version: see there.
        status: broken if it raised, exited, crashed or hung, or a check failed; unavailable if it cannot run here, or
            if torch cannot be imported, or the time for all was over.
        reason: what its probe said, or what went wrong.
        hint: what to do about it.
        api_version: the driver API it was written for; None if it could not be loaded, as for the following.
        priority: in ``auto``'s order.
        requires: packages that it is known to work with.
        variables: how the names of the environment variables begin that matter to it.
        probe_ms: milliseconds that its probe took.
        devices: those that were opened.
        log: the last lines of its process's stderr, if it is broken.
    """

    name: str
    entry_point: str
    package: str
    version: str
    status: Status = "broken"
    reason: str = ""
    hint: str = ""
    api_version: str | None = None
    priority: int | None = None
    requires: list[str] = attrs.Factory(list)
    variables: list[str] = attrs.Factory(list)
    probe_ms: float | None = None
    devices: list[Device] = attrs.Factory(list)
    log: list[str] = attrs.Factory(list)


@attrs.frozen
class Torch:
    """The installed torch.

    Attributes:
        version: with the build, such as +cpu; empty if it cannot be imported at all.
        git_version: the commit that it was built from.
        debug: whether it is a debug build.
        accelerator: the kind of device that it was built for; None for the CPU alone.
        config: torch's own description of its build.
        imports: whether ``import torch`` works here without hal, vendors' packages and all.
        problem: why not.
        remedy: what to do about it.
    """

    version: str = ""
    git_version: str = ""
    debug: bool = False
    accelerator: str | None = None
    config: str = ""
    imports: bool = True
    problem: str = ""
    remedy: str = ""


@attrs.frozen
class Package:
    """A package, and what somebody needs of it.

    Attributes:
        package: its name.
        required_by: torch-hal, or a driver.
        requirement: the versions that are known to work; empty if any will do.
        found: the installed version; None if there is none.
        fits: whether that is one of those.
    """

    package: str
    required_by: str
    requirement: str
    found: str | None
    fits: bool


@attrs.frozen
class Findings:
    """Everything that was found.

    Attributes:
        hal: its version, and ``driver_api`` the driver API's.
        driver_api: see there.
        python: implementation and version.
        platform: system, release and machine.
        cores: of the CPU.
        torch: the installed one.
        variables: the environment variables that matter.
        packages: see :class:`Package`.
        drivers: by name.
        ok: whether everything that is available works.
        schema: see :data:`SCHEMA`.
    """

    hal: str
    driver_api: str
    python: str
    platform: str
    cores: int
    torch: Torch
    variables: dict[str, str]
    packages: list[Package]
    drivers: list[Driver]
    ok: bool
    schema: int = SCHEMA


def as_json(findings: Findings) -> dict[str, Any]:
    """What ``--json`` prints."""
    return dict(cattrs.unstructure(findings))
