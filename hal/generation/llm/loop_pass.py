"""What the thread of hal.LLM runs beside the steps of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from hal.generation.llm.engine import Engine


class Pass(ABC):
    """Something that takes some steps, between which others may run.

    Attributes:
        alone: whether running texts must end first, and later ones wait.
    """

    alone: ClassVar[bool] = False

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether nothing is left to do."""

    @abstractmethod
    def step(self) -> bool:
        """Run a part. Return False if it needs room that others hold."""


class Change(Pass):
    """Changes the model while no text is generated.

    Args:
        make: makes the change. Other ranks get it by pickle.

    Attributes:
        result: what it returned.
    """

    alone = True

    def __init__(self, engine: Engine, make: Callable[[Engine], Any]) -> None:
        self._engine, self._make, self._made = engine, make, False
        self.result: Any = None

    @property
    def finished(self) -> bool:
        return self._made

    def step(self) -> bool:
        self.result, self._made = self._make(self._engine), True
        return True
