"""What the thread of hal.LLM runs beside the steps of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hal.errors import CommunicationError, HalError
from hal.generation.llm.engine import Engine
from hal.parallel.launch import gathered


class Pass(ABC):
    """Something that takes some steps, between which others may run.

    Attributes:
        alone: whether running texts must end first, and later ones wait.
    """

    alone: bool = False

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether nothing is left to do."""

    @abstractmethod
    def step(self) -> bool:
        """Run a part. Return False if it needs room that others hold."""


class Change(Pass):
    """Changes the model between two steps, on all ranks or on none.

    Args:
        make: makes the change. Other ranks get it by pickle.
        alone: whether no text is generated meanwhile.

    Attributes:
        result: what it returned.
        error: why no rank could, or None.
    """

    def __init__(self, engine: Engine, make: Callable[[Engine], Any], *, alone: bool) -> None:
        self._engine, self._make, self.alone, self._made = engine, make, alone, False
        self.result: Any = None
        self.error: HalError | None = None

    @property
    def finished(self) -> bool:
        return self._made

    def step(self) -> bool:
        try:
            self.result = self._make(self._engine)
        except HalError as error:
            self.error = error
        done = gathered(self.error is None, self._engine.runner.backend.mesh)
        if any(done) and not all(done):
            raise CommunicationError(
                "some ranks cannot change the model", "give each rank the same files, and memory"
            ) from self.error
        self._made = True
        return True
