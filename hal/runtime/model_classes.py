"""Model classes: the registered one of an architecture, which may be another package's."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from hal.errors import CheckpointError, ModelError, nearest
from hal.nn import CausalLM

GROUP = "hal.models"


def find_model(architecture: str) -> type[CausalLM]:
    """The model registered for an architecture's name; imports that one only.

    Raises:
        CheckpointError: none is.
        ModelError: it cannot be imported, or is no model.
    """
    known = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    if architecture not in known:
        raise CheckpointError(
            f"no model is registered for the architecture {architecture!r}", nearest(architecture, known)
        )
    entry = known[architecture]
    name = f"the model {architecture}, {entry.value},"
    try:
        found = entry.load()
    except Exception as error:  # importing runs code of others, which may raise anything
        raise ModelError(
            f"{name} cannot be imported: {type(error).__name__}: {error}",
            f"correct the entry point in the group {GROUP} of the package that registers it, or what it imports",
        ) from error
    return check_model_class(found, name)


def check_model_class(found: Any, name: str) -> type[CausalLM]:
    """Return ``found``, what ``name`` says, if it is the class of a model.

    Raises:
        ModelError: it is not.
    """
    if isinstance(found, type) and issubclass(found, CausalLM):
        return found
    raise ModelError(
        f"{name} is {found!r:.100}, not a class derived from hal.nn.CausalLM",
        "give the class of the model itself, not of its config or of a part of it",
    )
