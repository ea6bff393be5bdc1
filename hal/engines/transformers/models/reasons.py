"""Why a model of transformers cannot be probed, by the class that raised an exception."""

from __future__ import annotations

from torch import nn


def why(error: Exception) -> str:
    """Return what an exception of a model without values means, with the class of transformers that raised it.

    Args:
        error: the exception, with its traceback.
    """
    name = _class_of(error)
    if "nonzero" in str(error) or "meta tensor" in str(error) or "data-dependent" in str(error):
        return (
            f"{name} chooses what it computes by the values of tensors, such as which experts or languages occur, "
            "which a captured step does not see"
        )
    first = str(error).partition("\n")[0]
    return f"{name} does not compute the tokens of a step one by one ({type(error).__name__}: {first:.120})"


def _class_of(error: Exception) -> str:
    """Return the name of the innermost class of transformers' model code in which an exception was raised."""
    name, trace = "a layer", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and ".modeling_" in str(trace.tb_frame.f_globals.get("__name__")):
            name = type(owner).__name__
        trace = trace.tb_next
    return name
