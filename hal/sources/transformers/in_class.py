"""Attention that a class of transformers computes itself, as calls of hal's operation.

In a step, the scores between the product with the keys and that with the values do not matter. While a model is probed,
the scores note what happens to them, which says what kind of attention it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hal.errors import ConfigError
from hal.sources.transformers.masks import Mask, SeenMask, Zeros
from hal.sources.transformers.phase import PHASE, REMEDY

KEPT = frozenset(
    [
        "clone",
        "contiguous",
        "dropout",
        "expand",
        "float",
        "max",
        "maximum",
        "permute",
        "reshape",
        "to",
        "transpose",
        "type",
        "type_as",
        "unsqueeze",
        "view",
    ]
)
"""Functions of scores that do not change what they mean."""
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


@attrs.frozen
class Known:
    """What is known about scores.

    Attributes:
        tokens: the number of tokens, each of which is a sequence.
        masks: finds out what a tensor says that excludes scores, or returns None.
        zeros: the known zeros.
        scale: the factor of the products.
        alibi: the factor of position biases, or None.
        weights: whether they are weights already.
    """

    query: Tensor
    tokens: int
    masks: Callable[[Tensor], Mask | None]
    zeros: Zeros
    scale: float = 1.0
    mask: Mask | None = None
    alibi: float | None = None
    weights: bool = False


class Scores(Tensor):
    """The scores of a class that is probed, without values."""

    known: Known

    @classmethod
    def of(cls, known: Known, like: Tensor) -> Scores:
        """Return scores in the place of a tensor."""
        made = like.as_subclass(Scores)
        made.known = known
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and isinstance(args[1], Values):
            return PHASE.get().weigh(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor):
            return found
        scores = [each for each in args if isinstance(each, Scores)]
        others = [each for each in args if not isinstance(each, Scores)]
        name = func.__name__.strip("_")
        known = None if len(scores) != 1 else _changed(scores[0].known, name, others, found.shape)
        if known is None:
            raise ConfigError(
                f"attention is computed in the class, not by transformers' interface, and with {name} of the scores",
                REMEDY,
            )
        return Scores.of(known, found)


def _changed(known: Known, name: str, others: list[Any], shape: torch.Size) -> Known | None:
    """Return what is known about scores after a function of theirs, or None if hal's attention has nothing like it."""
    if name in KEPT:
        return known
    if name == "softmax":
        return attrs.evolve(known, weights=True)
    number = others[0] if others and isinstance(others[0], int | float) else None
    if name in ("mul", "imul", "rmul") and number is not None:
        return _scaled(known, number)
    if name in ("div", "truediv", "itruediv", "div_") and number:
        return _scaled(known, 1 / number)
    if name in ("add", "iadd", "radd"):
        return _added(known, others[0], shape)
    if name in ("masked_fill", "where"):
        tensors = [each for each in others if isinstance(each, Tensor) and each.dim()]
        says = known.masks(tensors[0]) if len(tensors) == 1 else None
        return None if says is None else _masked(known, says)
    return None


def _scaled(known: Known, factor: float) -> Known:
    alibi = None if known.alibi is None else known.alibi * factor
    return attrs.evolve(known, scale=known.scale * factor, alibi=alibi)


def _added(known: Known, other: Any, shape: torch.Size) -> Known | None:
    if isinstance(other, SeenMask):
        return _masked(known, other.says)
    if other in known.zeros:
        return known
    # Each token is a sequence here, so that biases by position are a number for each head. Their slopes are not known
    # without values; the comparison at load finds others than those of ALiBi.
    heads = math.prod(shape) // known.tokens if isinstance(other, Tensor) else 0
    if known.alibi is None and heads and other.numel() in (heads, math.prod(shape)):
        return attrs.evolve(known, alibi=1.0)
    return None


def _masked(known: Known, says: Mask) -> Known:
    """Return what is known after another mask. Of several, one says more than that attention is causal."""
    if known.mask in (None, Mask(), says):
        return attrs.evolve(known, mask=says)
    return known if says == Mask() else attrs.evolve(known, mask=Mask(problem="several masks"))


def buffer_of(model: nn.Module, tensor: Tensor) -> tuple[str, str] | None:
    """Return the path and the name of the buffer of which a tensor is a part, or None."""
    for path, module in model.named_modules():
        for name, each in module._buffers.items():
            if each is not None and (each is tensor or each is tensor._base):
                return path, name
    return None


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
