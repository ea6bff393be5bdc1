"""What goes wrong in a comparison, other than a difference, which is its result."""

from __future__ import annotations

from hal.errors import HalError


class CompareError(HalError):
    """Runs that cannot be compared, such as of a kernel that raises."""
