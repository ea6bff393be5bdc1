"""The recorded call of a tape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
from torch import Tensor
from torch.utils._pytree import tree_iter

from hal.errors import GraphError


@attrs.define
class Launch:
    """One recorded call and the new tensors that it returned.

    Attributes:
        results: the returned tensors that share no memory with an argument.
        fills: whether the call writes ``results`` itself. Otherwise a replay copies the returned tensors there.
        copied: the index of each result among the returned tensors.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor] = attrs.Factory(list)
    fills: bool = False
    copied: tuple[int, ...] = ()

    def replayable(self) -> Callable[[], Any]:
        """Return the function that a replay calls."""
        call = partial(self.function, *self.args, **self.kwargs)
        return call if self.fills or not self.results else partial(_refill, call, self.copied, self.results)

    @property
    def line(self) -> str:
        """The name, with the shapes and dtypes of the tensors."""
        arguments = ", ".join(_described(value) for value in tree_iter((self.args, self.kwargs)))
        return f"{self.name}({arguments}) -> {', '.join(map(_described, self.results)) or 'in place'}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts, in order."""
    return [value for value in tree_iter(tree) if isinstance(value, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return a key for a tensor's storage; for a packed weight, whose storage torch hides, for the tensor itself."""
    return id(tensor) if tensor.is_mkldnn else int(tensor.untyped_storage()._cdata)


def _refill(call: Callable[[], Any], copied: tuple[int, ...], results: list[Tensor]) -> None:
    """Run a call that cannot write into given memory, and copy its results there."""
    made = tensors_of(call())
    for index, result in zip(copied, results, strict=True):
        if made[index].shape != result.shape:
            raise GraphError(
                f"{call} returned shape {list(made[index].shape)} in a replay and {list(result.shape)} in the capture",
                "make the shape independent of tensor values",
            )
        result.copy_(made[index])
