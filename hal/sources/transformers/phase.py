"""What the calls of a model of transformers are for at present, which the functions that it calls ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

NAME = "hal_paged"
"""The name of the functions for attention, masks and experts in transformers' registries."""
REMEDY = "write a model for hal (docs/how-to/add-a-model-family.md), or run it with transformers"
PHASE: ContextVar[Any] = ContextVar("hal_phase", default=None)
"""What runs in this context. It is no argument of the layers, because many drop the arguments that they do not know."""


@contextmanager
def running(phase: Any) -> Iterator[None]:
    """Let ``phase`` serve the layers that are called in the block."""
    token = PHASE.set(phase)
    try:
        yield
    finally:
        PHASE.reset(token)
