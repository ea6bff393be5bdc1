"""The text of a driver whose rank 1 does something else than the others when it opens."""

from __future__ import annotations

LATE = """
import os, time
import hal
from hal.errors import DeviceError
from hal.parallel import collectives

class Late(hal.vendor.Driver):
    name, api_version, priority = "late", (4, 0), -5

    def probe(self):
        return hal.vendor.Probe(True, "")

    def open(self, options):
        if os.environ.get("RANK") == "1":
            {on_rank_1}
        return hal.Backend("late", hal.vendor.HostDevice(), kernels={{}}, distributed="gloo")
"""


def late_driver(on_rank_1: str) -> str:
    """Return a module with the driver class ``Late``.

    Args:
        on_rank_1: the statement that rank 1 runs.
    """
    return LATE.format(on_rank_1=on_rank_1)
