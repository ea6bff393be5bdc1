"""The error of comparisons that cannot be made; a difference is a result, and no error."""

from __future__ import annotations

from hal.errors import HalError


class CompareError(HalError):
    """Two runs cannot be compared, for example because a kernel raises."""
