"""The change of an adapter in the thread of hal.LLM."""

from __future__ import annotations

from hal.generation.llm.engine import Engine
from hal.generation.request import adapters_of


def change_adapter(engine: Engine, name: str, folder: str | None) -> None:
    """Load an adapter under its name in requests, or remove it if no folder is given.

    Raises:
        HalError: there is no room for adapters, or none of that name; the files are damaged or do not fit; or the model
            sleeps.
    """
    engine.runner.check_awake()  # It is compared with merged weights.
    adapters = adapters_of(engine.runner)
    if folder is None:
        adapters.remove(name)
    else:
        adapters.load(name, folder)
