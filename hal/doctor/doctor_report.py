"""The findings as text: lines and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hal.config.optional_libraries import DISTRIBUTION
from hal.device.host_capacity import crowded
from hal.doctor.findings import Check, Device, Driver, Findings, Ranks

Table = tuple[Sequence[str], list[Sequence[str]]]
"""Column names and rows."""
COLUMNS = ("check", "result", "what", "what to do")
"""Columns of the checks of a device or of ranks."""
PROBE_MS = 50
"""Time limit of a probe in milliseconds."""


def heading(findings: Findings) -> list[str]:
    """Return lines on versions, the machine and the variables."""
    torch = findings.torch
    build = f"git {torch.git_version[:12]}, for {torch.accelerator or 'CPU only'}{', debug' * torch.debug}"
    limit = f", of which this process may use {findings.usable_cores}" * (findings.usable_cores < findings.cores)
    lines = [
        f"hal {findings.hal}, driver API {findings.driver_api}, {findings.python}",
        f"torch {torch.version} ({build})" if torch.version else "torch cannot be imported",
        f"{findings.platform}, {findings.cores} cores{limit}",
        *(f"warning: {each}" for each in (crowded(findings.other_threads, findings.usable_cores),) if each),
        *(f"{name}={text}" for name, text in findings.variables.items()),
    ]
    return lines if torch.imports else [*lines, f"warning: {torch.problem}", f"remedy: {torch.remedy}"]


def packages(findings: Findings) -> Table:
    """Return a table of torch, the drivers' requirements, and all requirements that are not met."""
    rows: list[Sequence[str]] = [
        (
            each.package,
            each.found or "-",
            each.required_by,
            each.requirement or "any",
            "yes" if each.fits else "not installed" if each.found is None else "NO",
        )
        for each in findings.packages
        if each.package == "torch" or each.required_by != DISTRIBUTION or not each.fits
    ]
    return ("package", "installed", "for", "known to work", "fits"), rows


def drivers(findings: Findings) -> Table:
    """Return a table of the drivers and their status."""
    rows: list[Sequence[str]] = [
        (
            each.name,
            each.status.upper() if each.status == "broken" else each.status,
            f"{each.package or '?'} {each.version}".strip(),
            each.api_version or "-",
            _probe(each.probe_ms),
            each.reason,
            each.hint,
        )
        for each in findings.drivers
    ]
    return ("driver", "status", "package", "API", "probe", "why", "what to do"), rows


def _probe(ms: float | None) -> str:
    """Return the probe's duration, marked if it exceeds the limit."""
    if ms is None:
        return "-"
    return f"{ms:g} ms" if ms <= PROBE_MS else f"{ms:g} ms, over {PROBE_MS}"


def devices(findings: Findings) -> Iterator[tuple[str, Table]]:
    """Yield a heading and a table for each examined device."""
    for driver in findings.drivers:
        for device in driver.devices:
            yield f"{driver.name}: {device.name} ({device.device})", _device(device)


def ranks(findings: Findings) -> Iterator[tuple[str, Table]]:
    """Yield a heading and a table for each examined group of ranks."""
    for driver in findings.drivers:
        if (found := driver.ranks) is not None:
            where = ", ".join(each or "no device" for each in found.devices)
            yield f"{driver.name}: {found.number} ranks ({where})", _ranks(found)


def _ranks(found: Ranks) -> Table:
    rows: list[Sequence[str]] = [_check(each) for each in found.checks]
    if found.skipped:
        rows.append(("ranks", "skipped", found.skipped, ""))
    if found.latency_us is not None:
        rows.append(("latency", f"{found.latency_us:g} us", "all_reduce of 8 KiB", ""))
    if found.bandwidth_gb_per_s is not None:
        rows.append(("bandwidth", f"{found.bandwidth_gb_per_s:g} GB/s", "all_reduce of 64 MiB", ""))
    return COLUMNS, rows


def _check(check: Check) -> Sequence[str]:
    outcome = "FAILED" if check.outcome == "failed" else check.outcome
    return check.name, outcome, check.detail, check.remedy


def _device(device: Device) -> Table:
    rows: list[Sequence[str]] = [_check(each) for each in device.checks]
    if (found := device.measures) is not None:
        copied = f"{found.copy_bytes / 2**20:g} MiB, {'pinned' if found.pinned else 'pageable'} memory"
        free, total = (number / 2**30 for number in (found.memory_free_bytes, found.memory_total_bytes))
        rows += [
            ("host to device", f"{found.host_to_device_gb_per_s:g} GB/s", copied, ""),
            ("device to host", f"{found.device_to_host_gb_per_s:g} GB/s", copied, ""),
            ("launch", f"{found.launch_us:g} us", "host time of one small kernel", ""),
            ("memory free", f"{free:.1f} GiB", f"of {total:.1f} GiB", ""),
        ]
    return COLUMNS, rows


def logs(driver: Driver) -> list[str]:
    """Return the last lines of a broken driver's stderr, indented."""
    return [f"last output of {driver.name}:", *(f"  {line}" for line in driver.log)] if driver.log else []
