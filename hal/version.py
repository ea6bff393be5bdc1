"""The versions of the distribution and of the driver API. Imports nothing: packaging reads it without torch."""

__version__ = "0.1.0"

API_VERSION = (4, 0)
"""The driver API of this release. Drivers with the same major version and no higher minor version load.

Additions in a minor version have defaults, so a driver for 4.0 loads unchanged. ``hal.drivers.driver.ADDED`` lists
them.
"""
