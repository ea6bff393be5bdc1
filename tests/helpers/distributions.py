"""Installed distributions: whether one is there, and the installation of one for a test."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def installed(distribution: str) -> bool:
    """Return whether a distribution is installed. Tests of the core hide torch_npu from imports."""
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def install(site: Path, name: str, entry_points: str, version: str = "1.0", **modules: str) -> None:
    """Write a distribution, its metadata and modules, into a folder, which the caller puts on the path.

    Args:
        site: the folder.
        name: the distribution's name.
        entry_points: the content of its entry_points.txt.
        version: its version.
        modules: the text of each module, by name.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text, encoding="utf-8")
