"""The findings as plain values; their attributes are the keys of the JSON document of ``hal doctor``."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import cattrs

SCHEMA = 1
"""Version of the JSON document; incremented when a key is removed or changes its meaning."""

Outcome = Literal["passed", "failed", "skipped"]
Status = Literal["works", "unavailable", "broken"]


@attrs.frozen
class Check:
    """A check of a device.

    Attributes:
        name: name of the check.
        outcome: ``skipped`` if the backend does not support it.
        detail: description of the work, of the failure, or of the reason for skipping.
        remedy: what to do about a failure.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    remedy: str = ""


@attrs.frozen
class Measures:
    """Speed and memory of a device; all times are medians.

    Attributes:
        host_to_device_gb_per_s: copy rate to the device, in 10**9 bytes per second.
        device_to_host_gb_per_s: copy rate from the device.
        copy_bytes: bytes per copy.
        pinned: whether the host memory is page-locked.
        launch_us: microseconds of host time to launch a small kernel.
        memory_free_bytes: free device memory.
        memory_total_bytes: total device memory.
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
    """A device of a driver that could be opened.

    Attributes:
        device: torch's name of the device.
        name: product name.
        checks: checks in the order of execution.
        measures: None if the examination ended before measuring.
    """

    device: str
    name: str
    checks: list[Check] = attrs.Factory(list)
    measures: Measures | None = None


@attrs.define
class Ranks:
    """Several ranks of a driver, which form a group.

    Attributes:
        number: number of ranks.
        devices: torch's name of each rank's device, by rank; empty for a rank that opened none.
        skipped: why nothing was examined; else empty.
        checks: checks in the order of execution. A check that fails on any rank fails.
        latency_us: microseconds of an all_reduce of 8 KiB; None, as below, if the examination ended before measuring.
        bandwidth_gb_per_s: bytes of an all_reduce of 64 MiB, divided by its duration, in 10**9 per second.
    """

    number: int
    devices: list[str] = attrs.Factory(list)
    skipped: str = ""
    checks: list[Check] = attrs.Factory(list)
    latency_us: float | None = None
    bandwidth_gb_per_s: float | None = None


@attrs.define
class Driver:
    """An installed driver.

    Attributes:
        name: name of the entry point.
        entry_point: module and class.
        package: distribution that provides it; empty if unknown.
        version: version of the distribution; empty if unknown.
        status: ``broken`` if it raised, exited, crashed or hung, or a check failed; ``unavailable`` if it cannot run
            here, if torch cannot be imported, or if the time ran out.
        reason: the probe's reason, or the failure.
        hint: what to do about it.
        api_version: driver API version; None, as for the following, if the driver could not be loaded.
        priority: priority for ``auto``.
        requires: requirements that it is tested with.
        variables: prefixes of the environment variables that affect it.
        probe_ms: duration of its probe in milliseconds.
        devices: devices that were opened.
        ranks: several ranks together, if they were asked for.
        log: last lines of its process's stderr, if it is broken.
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
    ranks: Ranks | None = None
    log: list[str] = attrs.Factory(list)


@attrs.frozen
class Torch:
    """The installed torch.

    Attributes:
        version: with the build, such as +cpu; empty if torch cannot be imported.
        git_version: commit of the build.
        debug: whether it is a debug build.
        accelerator: device type of the build; None for CPU only.
        config: torch's description of its build.
        imports: whether ``import torch`` works without hal, with all vendors' packages.
        problem: why it fails.
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
    """A required package.

    Attributes:
        package: name of the distribution.
        required_by: torch-hal, or a driver.
        requirement: tested versions; empty if any version is accepted.
        found: installed version; None if not installed.
        fits: whether the installed version meets the requirement.
    """

    package: str
    required_by: str
    requirement: str
    found: str | None
    fits: bool


@attrs.frozen
class Findings:
    """All findings.

    Attributes:
        hal: version of hal.
        driver_api: version of the driver API.
        python: implementation and version.
        platform: system, release and machine.
        cores: number of CPU cores.
        usable_cores: cores that this process may use by its affinity and its container's quota.
        other_threads: running threads of other processes on average, before the examination; None if unknown.
        torch: installed torch.
        variables: relevant environment variables.
        packages: required packages.
        drivers: installed drivers, by name.
        ok: whether everything that is available works.
        schema: see :data:`SCHEMA`.
    """

    hal: str
    driver_api: str
    python: str
    platform: str
    cores: int
    usable_cores: int
    other_threads: float | None
    torch: Torch
    variables: dict[str, str]
    packages: list[Package]
    drivers: list[Driver]
    ok: bool
    schema: int = SCHEMA


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    return dict(cattrs.unstructure(findings))
