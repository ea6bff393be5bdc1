"""Copying of a model for a trace, with replaced tensors. The model is not changed, since other threads may run it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def copy_model(model: nn.Module, tensors: Mapping[int, Tensor]) -> nn.Module:
    """Return a copy of a model's modules with other parameters and buffers.

    The copy preserves the sharing of modules and tensors. Containers of modules and bound methods of modules are copied
    and refer to the copies. All other attribute values are shared with the model.

    Args:
        model: the model to copy.
        tensors: the replacement of each parameter and buffer, by the id of the original.
    """
    modules = {id(module) for module in model.modules()}

    def is_copied(value: Any) -> bool:
        return id(value.__self__ if isinstance(value, MethodType) else value) in modules

    # A copy of a tensor would be an operation of the trace, and a lock or a handle cannot be copied.
    values = tree_leaves([vars(module) for module in model.modules()])
    shared = {id(value): value for value in values if not is_copied(value)}
    return copy.deepcopy(model, {**shared, **tensors})
