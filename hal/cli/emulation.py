"""``--emulate``: a backend's driver on an emulated device, for the drivers that have the option ``emulator``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hal.errors import ConfigError

EMULATE = "Run the backend's driver on an emulated device: the same as its option emulator."


@contextmanager
def emulated(emulate: bool, backend: str | None) -> Iterator[dict[str, Any]]:
    """What ``--emulate`` adds to the driver's options. Open the backend inside the block.

    Args:
        emulate: whether the option was given; if not, nothing is added.
        backend: what ``--backend`` says; None leaves it to the environment.

    Raises:
        ConfigError: neither names a driver, or the driver has no such option.
    """
    if not emulate:
        yield {}
        return
    from hal.config import environment_options

    named = backend or _backend_of_the_environment()
    if named == "auto":
        raise ConfigError(
            "--emulate was given, and no driver to emulate a device for",
            "name one, by --backend NAME or HAL_BACKEND; `hal backends` lists them",
        )
    try:
        # A variable may ask for more than true does, such as to hide a real device.
        yield {"emulator": environment_options(named).get("emulator") or True}
    except ConfigError as error:
        if "unknown key 'emulator'" not in error.problem:
            raise
        raise ConfigError(
            f"--emulate was given, and the driver {named} has no emulated device: {error.problem}",
            "leave --emulate out, or choose another backend",
        ) from error


def _backend_of_the_environment() -> str:
    from hal.config import environment_mapping
    from hal.drivers.registry import driver_names  # which needs torch

    return str(environment_mapping(driver_names=driver_names()).get("backend", "auto"))
