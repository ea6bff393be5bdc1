"""A model on other tensors, for a trace: the model itself stays as it is, for other threads run it meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn


def stand_in(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """A copy of the modules that a model is made of, with other parameters and buffers.

    What is one module or tensor in the model is one in the copy. All else that modules have is shared with the model,
    but for lists, tuples, dicts and methods that lead to its modules: these lead to the copies.

    Args:
        model: whose modules are copied.
        tensors: by the id of each parameter and buffer, what stands in its place.
    """
    copies = {id(module): module.__new__(type(module)) for module in model.modules()}

    def again(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return copies.get(id(value), value)
        if isinstance(value, MethodType):
            owner = again(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) is dict:
            found: Any = dict(zip(value, map(again, value.values()), strict=True))
            return found if any(found[key] is not each for key, each in value.items()) else value
        if type(value) in (list, tuple):
            found = type(value)(map(again, value))
            return found if any(one is not each for one, each in zip(found, value, strict=True)) else value
        return value

    for module in model.modules():
        copy = copies[id(module)]
        copy.__dict__ = {name: again(each) for name, each in vars(module).items()}
        for kind in ("_parameters", "_buffers"):
            copy.__dict__[kind] = {
                name: None if each is None else tensors[id(each)] for name, each in vars(module)[kind].items()
            }
        copy.__dict__["_modules"] = {name: again(each) for name, each in vars(module)["_modules"].items()}
    return copies[id(model)]
