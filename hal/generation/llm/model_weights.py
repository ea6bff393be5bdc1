"""The weights of the model of hal.LLM and of its drafter: how others replace them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.errors import ConfigError
from hal.execution.replace_weights import NewWeights, replace_weights
from hal.execution.runner import Runner
from hal.generation.llm.engine import Engine


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
