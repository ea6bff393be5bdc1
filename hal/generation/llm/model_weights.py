"""The weights, caches and adapters of the model of hal.LLM and its drafter: how they change, and how they sleep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.weight_release import Kept
from hal.errors import ConfigError, HalError
from hal.execution.replace_weights import NewWeights, replace_weights
from hal.execution.runner import Runner
from hal.execution.sleep import sleep, wake
from hal.execution.sleep_state import Part, Slept
from hal.generation.llm.engine import Engine
from hal.generation.request import adapters_of


def runners_of(engine: Engine) -> list[Runner]:
    """Return the runner of the model, and that of the drafter, if it has one."""
    drafting = None if engine.speculation is None else engine.speculation.drafter.drafting
    return [engine.runner, *([] if drafting is None else [drafting])]


def pairs_of(tensors: NewWeights) -> Iterable[tuple[str, Tensor]]:
    """Return new weights as names and tensors, each valid until the next is taken."""
    if isinstance(tensors, Checkpoint):
        return tensors.read(tensors.tensors)
    assert not isinstance(tensors, str), "a path names a checkpoint"
    return tensors.items() if isinstance(tensors, Mapping) else tensors  # type: ignore[return-value]


def replace(engine: Engine, tensors: NewWeights, drafter: bool) -> None:
    """Replace the weights of the model or of its drafter, and drop the prefixes that the former ones computed.

    Raises:
        CheckpointError: as :func:`hal.replace_weights`.
        ConfigError: there is no drafter with weights.
    """
    runners = runners_of(engine)
    if drafter and len(runners) == 1:
        raise ConfigError(
            "drafter is set, and hal.LLM has no drafter with weights", "leave it out, or pass draft to hal.LLM"
        )
    replace_weights(runners[drafter], tensors)
    engine.runner.forget()  # The drafter's cache has the same blocks.


def sleep_all(engine: Engine, weights: Kept, caches: bool) -> Slept:
    """Let the model and its drafter sleep; see :func:`hal.sleep`."""
    for each in runners_of(engine):
        each.check_awake()
    model, *drafters = runners_of(engine)
    found = [sleep(each, weights=weights, caches=caches) for each in (*drafters, model)]  # It uses the model's weights.
    return Slept.sum(found)


def wake_all(engine: Engine, part: Part | None) -> None:
    """Let the model and its drafter wake; see :func:`hal.wake`."""
    for each in runners_of(engine):
        wake(each, part)


def asleep(engine: Engine) -> HalError | None:
    """Return the error of a text while the model or its drafter sleeps; else None."""
    return next((error for each in runners_of(engine) if (error := each.sleep_error) is not None), None)


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
