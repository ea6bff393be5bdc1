"""What the cache returns to a class of transformers that computes attention itself: keys and values whose products with
queries and weights the phase that runs computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hal.engines.transformers.models.phase import PHASE

PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm})
SUMS = frozenset({torch.baddbmm, Tensor.baddbmm})
"""Functions of scores to start with, queries and keys."""
SHAPING = frozenset(
    {
        Tensor.contiguous,
        Tensor.expand,
        Tensor.flatten,
        Tensor.float,
        Tensor.permute,
        Tensor.repeat_interleave,
        Tensor.reshape,
        Tensor.squeeze,
        Tensor.to,
        Tensor.transpose,
        Tensor.type,
        Tensor.type_as,
        Tensor.unsqueeze,
        Tensor.view,
        Tensor.__getitem__,
        torch.repeat_interleave,
        torch.transpose,
    }
)
"""Functions of cached keys or values that return them in another shape or dtype."""


class _Cached(Tensor):
    """What the cache returns to the layers of a model that is probed."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = cls._product(func, args, kwargs or {})
        if found is not None:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(cls) if func in SHAPING else found

    @classmethod
    def _product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None


class Keys(_Cached):
    """The keys of this step's tokens, ``[tokens, heads, 1, head_dim]`` or what a class made of them."""

    @classmethod
    def _product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in PRODUCTS and isinstance(args[1], Keys):
            return PHASE.get().score(args[0], args[1])
        if func in SUMS:
            first, query, keys = batches_of(args, kwargs)
            if isinstance(keys, Keys):
                found, beta = PHASE.get().score(query, keys) * kwargs.get("alpha", 1), kwargs.get("beta", 1)
                return found + (first if beta == 1 else first * beta)
        return None


class Values(_Cached):
    """The values of this step's tokens, like :class:`Keys`."""

    @classmethod
    def _product(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in PRODUCTS and isinstance(args[1], Values):
            return PHASE.get().weigh(args[0], args[1])
        return None


class Returned:
    """What a class gets for its keys or values in a step, which may be traced: no tensor, but it acts as one.

    Args:
        tensor: this step's keys or values, or what the class made of them.
        product: computes the product of something with them.
    """

    def __init__(self, tensor: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._tensor, self._product = tensor, product

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._tensor, name)
        return (lambda *args, **kwargs: self._again(found(*args, **kwargs))) if callable(found) else found

    def __getitem__(self, place: Any) -> Any:
        return self._again(self._tensor[place])

    def _again(self, found: Any) -> Any:
        return Returned(found, self._product) if isinstance(found, Tensor) else found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS and isinstance(second := args[1], Returned):
            return second._product(args[0], second._tensor)
        if func in SUMS and isinstance(keys := batches_of(args, kwargs)[2], Returned):
            first, query, _ = batches_of(args, kwargs)
            return first * kwargs.get("beta", 1) + keys._product(query, keys._tensor) * kwargs.get("alpha", 1)
        plain = tree_map_only(Returned, lambda each: each._tensor, (args, kwargs))
        found = func(*plain[0], **plain[1])
        return args[0]._again(found) if func in SHAPING and isinstance(args[0], Returned) else found


def batches_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the first three arguments of a function of :data:`SUMS`."""
    first, query, keys = (*args, *(kwargs[name] for name in ("batch1", "batch2") if name in kwargs))
    return first, query, keys
