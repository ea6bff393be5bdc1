"""Configurations of models that are often measured; ``hal/checkpoint/random_weights.py`` generates their weights."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import reduce
from importlib.resources import files
from operator import or_
from typing import Any


def _read() -> dict[str, dict[str, Any]]:
    read = tomllib.loads((files(__package__) / "shapes.toml").read_text(encoding="utf-8"))
    return {
        name: reduce(or_, (read["families"][each] for each in shapes.pop("of")), {}) | shapes
        for name, shapes in read["shapes"].items()
    }


SHAPES: Mapping[str, Mapping[str, Any]] = _read()
"""config.json by name."""
