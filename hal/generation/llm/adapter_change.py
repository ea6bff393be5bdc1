"""The change of an adapter in the thread of hal.LLM."""

from __future__ import annotations

from hal.errors import CommunicationError, HalError
from hal.generation.llm.engine import Engine
from hal.generation.llm.loop_pass import Pass
from hal.generation.request import adapters_of
from hal.parallel.launch import gathered


class AdapterChange(Pass):
    """Loads or removes an adapter between two steps, on all ranks or on none.

    Args:
        name: its name in requests.
        folder: where it is; None to remove it.

    Attributes:
        error: why no rank could, or None.
    """

    def __init__(self, engine: Engine, name: str, folder: str | None) -> None:
        self._engine, self._name, self._folder = engine, name, folder
        self._made = False
        self.error: HalError | None = None

    @property
    def finished(self) -> bool:
        return self._made

    def step(self) -> bool:
        runner = self._engine.runner
        try:
            runner.check_awake()  # It is compared with merged weights.
            adapters = adapters_of(runner)
            if self._folder is None:
                adapters.remove(self._name)
            else:
                adapters.load(self._name, self._folder)
        except HalError as error:
            self.error = error
        done = gathered(self.error is None, runner.backend.mesh)
        if any(done) and not all(done):
            raise CommunicationError(
                f"some ranks cannot change the adapter {self._name!r:.70}", "give each rank the same files"
            ) from self.error
        self._made = True
        return True
