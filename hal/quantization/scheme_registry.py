"""The registered quantization schemes of all installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.config.plugins import Plugin, Plugins, instance_of
from hal.errors import ConfigError
from hal.quantization.scheme import Scheme

GROUP = "hal.quantization"


def _check(plugin: Plugin, found: Any) -> Scheme:
    scheme: Scheme = instance_of(Scheme, GROUP)(plugin, found)
    lacking = [("write", scheme.writes), ("activation", scheme.calibrated)]
    if missing := [name for name, needed in lacking if needed and name not in _overridden(scheme)]:
        raise ConfigError(
            f"the quantization scheme {plugin.name} sets `writes` or `calibrated` but has no {missing[0]}()",
            "install a release of its package that implements the method, or remove `writes` and `calibrated`",
        )
    return scheme


SCHEMES: Plugins[Scheme] = Plugins(GROUP, "quantization scheme", _check)


def schemes() -> Mapping[str, Scheme]:
    """Return the registered schemes, by name. Logs a warning for each that cannot be loaded."""
    return SCHEMES.load_all().plugins


def supported() -> str:
    """Return the supported schemes and formats, as a remedy of an error."""
    known = "; ".join(f"{scheme.summary} ({name})" for name, scheme in schemes().items())
    return f"hal supports {known}, in the formats of compressed-tensors and ModelSlim"


def _overridden(scheme: Scheme) -> set[str]:
    return {name for name in ("write", "activation") if getattr(type(scheme), name) is not getattr(Scheme, name)}
