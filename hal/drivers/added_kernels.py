"""Kernels for forms of weights that installed packages add to the drivers of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.config.plugins import Plugin, Plugins
from hal.errors import ConfigError
from hal.ops.kernels.form_kernels import AddedKernel
from hal.ops.kernels.kernel_table import Kernel

GROUP = "hal.kernels"


def _added(plugin: Plugin, found: Any) -> AddedKernel:
    if not isinstance(found, AddedKernel):
        raise ConfigError(
            f"the entry point {plugin.name} in {GROUP} is {found!r:.70}", "point it at a hal.vendor.AddedKernel"
        )
    return found


KERNELS: Plugins[AddedKernel] = Plugins(GROUP, "kernel", _added)


def with_added(backend: str, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Return a driver's kernels, by operation, and those that packages add. Logs a warning for each that is broken."""
    found = dict(kernels)
    for each in KERNELS.load_all().plugins.values():
        if each.backend == backend:
            found[each.operation] = each.before(found.get(each.operation))
    return found
