"""The registered quantization schemes of all installed packages."""

from __future__ import annotations

from collections.abc import Mapping

from hal.config.plugins import Plugins, instance_of
from hal.quantization.scheme import Scheme

GROUP = "hal.quantization"
SCHEMES: Plugins[Scheme] = Plugins(GROUP, "quantization scheme", instance_of(Scheme, GROUP))


def schemes() -> Mapping[str, Scheme]:
    """Return the registered schemes, by name. Logs a warning for each that cannot be loaded."""
    return SCHEMES.load_all().plugins
