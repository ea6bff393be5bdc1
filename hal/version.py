"""The versions of the distribution and of the driver API. It has no imports: packaging reads it without torch."""

__version__ = "0.1.0"

API_VERSION = (2, 0)
"""The driver API of this release. A driver of the same major version and no higher minor version loads.

What a minor version adds has a default, so a driver for 2.0 loads as it is. ``hal.drivers.driver.ADDED`` lists the
additions.
"""
