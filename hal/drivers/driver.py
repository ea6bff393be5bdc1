"""What a vendor implements: a driver that says whether it can run here, and opens a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import attrs

from hal.drivers.backend import Backend

ADDED: Mapping[tuple[int, int], tuple[str, ...]] = MappingProxyType({})
"""By minor version of the driver API above the first of its major, what it added for drivers to define or to give."""


@attrs.frozen
class Probe:
    """Whether a driver can run here.

    Attributes:
        available: whether :meth:`Driver.open` can be expected to succeed.
        reason: what was found, in a sentence; required when not available.
        hint: what a user can do about it; required when not available.
    """

    available: bool
    reason: str = ""
    hint: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.available and not (self.reason and self.hint):
            raise ValueError("a probe that says unavailable must give a reason and a hint")


class Driver(ABC):
    """A vendor's entry in the group ``hal.drivers``. Instances are cheap and hold no hardware.

    Attributes:
        name: the entry point's name, and what a config says to choose it. A driver under another name does not load.
        api_version: the driver API that it was written for, such as ``(2, 0)``.
        priority: ``auto`` takes the available driver of highest priority.
        requires: the packages that it is known to work with, as requirements such as ``torch==2.13.*``. Nothing is
            refused for them; ``hal doctor`` compares what is installed, and warns.
        variables: how the names begin of the environment variables that matter to it beside ``HAL_*``, such as
            ``ACME_``. ``hal doctor`` shows them, so name none that holds a secret.
    """

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]]
    priority: ClassVar[int] = 0
    requires: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def probe(self) -> Probe:
        """Say whether the driver can run here, within 50 ms.

        Must not import the vendor's packages (``importlib.util.find_spec`` is enough) nor initialise hardware.
        """

    def probe_for(self, options: Mapping[str, Any]) -> Probe:
        """Say whether :meth:`open` can be expected to succeed with ``options``, under the same rules as :meth:`probe`.

        Override it where an option makes the driver run elsewhere than :meth:`probe` thinks, as on an emulator.
        """
        return self.probe()

    @abstractmethod
    def open(self, options: Mapping[str, Any]) -> Backend:
        """Open the hardware. May import anything.

        Args:
            options: the config's ``options``; read them with :func:`hal.config.read` so that unknown ones are errors.
        """

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """The options with which :meth:`open` opens each device that there is, one after the other.

        ``hal doctor`` asks, after it has opened the driver with ``options``, and examines each. May import anything.

        Args:
            options: the user's. A device that they name is the only one to return.

        Returns:
            ``options`` alone by default, which is right where there is one device.
        """
        return (options,)
