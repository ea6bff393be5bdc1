"""The type of options that are seconds."""

from __future__ import annotations

import math
from typing import Any

import click

from hal.config.bounds import SECONDS


class Seconds(click.FloatRange):
    """A number of seconds, from 1 to :data:`~hal.config.bounds.SECONDS`."""

    def __init__(self) -> None:
        super().__init__(1, SECONDS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number. click takes NaN for a number in every range."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return number
