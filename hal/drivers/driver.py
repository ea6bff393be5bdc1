"""The driver interface: probe whether the hardware is usable, and open a backend on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

if TYPE_CHECKING:
    from hal.drivers.backend import Backend

ADDED: Mapping[tuple[int, int], tuple[str, ...]] = MappingProxyType({})
"""The additions of each minor version of the driver API after the first, for drivers to define or return."""


@attrs.frozen
class Probe:
    """The result of probing a driver.

    Attributes:
        available: whether :meth:`Driver.open` is expected to succeed.
        reason: the finding, as a sentence; required if unavailable.
        hint: the action for the user to take; required if unavailable.
    """

    available: bool
    reason: str = ""
    hint: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.available and not (self.reason and self.hint):
            raise ValueError("a Probe with available=False must have a reason and a hint")


class Driver(ABC):
    """A vendor's entry in the group ``hal.drivers``. Instances are cheap and hold no hardware.

    Attributes:
        name: the name in configurations, equal to the entry point's name. A driver whose names differ does not load.
        api_version: the driver API that the driver implements, such as ``(4, 0)``.
        priority: ``auto`` selects the available driver with the highest priority.
        requires: the package versions that the driver supports, as requirements such as ``torch==2.13.*``. They are not
            enforced; ``hal doctor`` warns about installed packages that differ.
        variables: prefixes of relevant environment variables besides ``HAL_*``, such as ``ACME_``. ``hal doctor``
            prints these variables, so no prefix may match a secret.
    """

    name: ClassVar[str]
    api_version: ClassVar[tuple[int, int]]
    priority: ClassVar[int] = 0
    requires: ClassVar[tuple[str, ...]] = ()
    variables: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def probe(self) -> Probe:
        """Return whether the driver can run on this machine, within 50 ms.

        Must not import the vendor's packages (``importlib.util.find_spec`` is enough) nor initialize hardware.
        """

    def probe_for(self, options: Mapping[str, Any]) -> Probe:
        """Return whether :meth:`open` is expected to succeed with ``options``, under the rules of :meth:`probe`.

        Override it if an option changes where the driver can run, such as one that selects an emulator.
        """
        return self.probe()

    @abstractmethod
    def open(self, options: Mapping[str, Any]) -> Backend:
        """Open the hardware. May import anything.

        Args:
            options: the configuration's ``options``. Read them with :func:`hal.config.read`, which rejects unknown
                ones.
        """

    def devices(self, options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the options that open each available device.

        ``hal doctor`` calls it after opening the driver with ``options``, and examines each device. May import
        anything.

        Args:
            options: the user's options. If they select a device, return that device only.

        Returns:
            One mapping per device. The default returns ``options`` alone, which is right for a single device.
        """
        return (options,)
