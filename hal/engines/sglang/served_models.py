"""The models that hal runs inside SGLang. All others are refused."""

from __future__ import annotations

import os

import hal
from hal.checkpoint.loading import build_model
from hal.errors import ModelError
from hal.step import SEQUENCE, TOKEN

_INSTEAD = "run the model with hal.LLM or `hal serve`"


def check_checkpoint(path: str, config: hal.Config) -> None:
    """Check the model of a folder, without its weights and before SGLang starts its processes.

    Args:
        path: SGLang's ``--model-path``.
        config: hal's configuration.

    Raises:
        CheckpointError: as :func:`hal.load_model`.
        ModelError: as :func:`check_model`.
    """
    if os.path.isdir(path):
        checkpoint = hal.Checkpoint.open(path)
        check_model(build_model(checkpoint, source=config.model_source, cache_dtype=config.cache.dtype))


def check_model(model: hal.nn.CausalLM) -> None:
    """Check that SGLang's cache fits a model.

    Raises:
        ModelError: the model generates no text, or a layer keeps anything but a key and a value per token.
    """
    name = type(model).__name__
    if not model.causal:
        raise ModelError(f"{name} attends to later tokens, so it generates no text", "use hal.LLM.embed")
    for index, states in enumerate(model.states):
        first, *others = states.values()
        if any(each.per is SEQUENCE for each in states.values()):
            raise ModelError(
                f"layer {index} of {name} keeps states per sequence, whose pool SGLang's platforms cannot replace",
                _INSTEAD,
            )
        if first.per is not TOKEN or len(first.shape) != 2 or others != [first]:
            raise ModelError(
                f"layer {index} keeps {dict(states)!s:.200}; hal inside SGLang supports a key and a value per token",
                _INSTEAD,
            )
