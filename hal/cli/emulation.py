"""The option ``--emulate``, which runs a driver on an emulated device through its option ``emulator``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hal.errors import ConfigError

EMULATE = "Run the backend's driver on an emulated device; sets its option emulator."


@contextmanager
def emulated(emulate: bool, backend: str | None) -> Iterator[dict[str, Any]]:
    """Yield the driver options that ``--emulate`` adds. Open the backend inside the block.

    Args:
        emulate: whether the option was given; if not, nothing is added.
        backend: value of ``--backend``; None uses the environment's.

    Raises:
        ConfigError: no driver is named, or it has no such option.
    """
    if not emulate:
        yield {}
        return
    from hal.config import environment_options

    named = backend or _backend_of_the_environment()
    if named == "auto":
        raise ConfigError(
            "--emulate needs a driver, and none is named",
            "use --backend NAME or HAL_BACKEND; `hal backends` lists the drivers",
        )
    try:
        # The variable may request more than True does, for example to hide a real device.
        yield {"emulator": environment_options(named).get("emulator") or True}
    except ConfigError as error:
        if "unknown key 'emulator'" not in error.problem:
            raise
        raise ConfigError(
            f"the driver {named} has no emulated device (--emulate): {error.problem}",
            "omit --emulate, or choose another --backend",
        ) from error


def _backend_of_the_environment() -> str:
    from hal.drivers.registry import read_config  # imports torch

    return str(read_config().get("backend", "auto"))
