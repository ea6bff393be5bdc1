"""The two parts of a causal language model of transformers: what computes hidden states, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal.errors import ConfigError
from hal.sources.transformers.phase import PHASE, REMEDY, running


@attrs.frozen
class Given:
    """An argument of a model's forward that each step has anew."""

    name: str


TOKENS, POSITIONS, CACHE = Given("token ids"), Given("positions"), Given("cache")


@attrs.frozen
class Body:
    """The submodule that computes hidden states, and how the model calls it.

    Attributes:
        args: its arguments; a :class:`Given` stands for what each step has anew.
        kwargs: likewise.
        output: the class of its output, None for a tuple.
        field: the name of the hidden states in it.
        length: the length of a tuple.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    field: str
    length: int

    def __call__(self, model: nn.Module, given: Mapping[Given, Any]) -> Tensor:
        """Return the hidden states ``[tokens, 1, width]``."""
        args = [given.get(each, each) if isinstance(each, Given) else each for each in self.args]
        kwargs = {
            name: given.get(each, each) if isinstance(each, Given) else each for name, each in self.kwargs.items()
        }
        return first_tensor(model.get_submodule(self.path)(*args, **kwargs))

    def returned(self, hidden: Tensor) -> Any:
        """Return what the submodule returns with these hidden states."""
        if self.output is None:
            return (hidden, *[None] * (self.length - 1))
        return self.output(**{self.field: hidden})


@attrs.frozen
class Head:
    """The phase in which a model computes logits: the submodule returns given hidden states."""

    returned: Any


def first_tensor(output: Any) -> Tensor:
    """Return the hidden states of a submodule's output."""
    found = output if isinstance(output, Tensor) else output[0]
    assert isinstance(found, Tensor)
    return found


class BodyProbe:
    """Finds the submodule that computes hidden states, in a call of a model.

    Args:
        given: the arguments that each step has anew, by their stand-ins.
    """

    def __init__(self, model: nn.Module, given: Mapping[Given, Any]) -> None:
        self._given = {id(value): each for each, value in given.items()}
        self._depth = 0
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._hooks: list[Any] = []
        for path, module in model.named_modules():
            if module is not model:
                self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._leaver(path), with_kwargs=True))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1

    def _leaver(self, path: str) -> Any:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._depth -= 1
            if not self._depth:
                self._calls.append((path, args, kwargs, output))

        return leave

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def body(self) -> Body:
        """Return the submodule: the first that the model called, which got the token ids.

        Raises:
            ConfigError: the model is built otherwise.
        """
        if not self._calls:
            raise ConfigError("the model of transformers calls no submodule", REMEDY)
        path, args, kwargs, output = self._calls[0]
        taken = [self._taken(each) for each in args], {name: self._taken(each) for name, each in kwargs.items()}
        values = (*taken[0], *taken[1].values())
        if not any(each is TOKENS for each in values) or any(isinstance(each, Tensor) for each in values):
            raise ConfigError(f"the model of transformers computes tensors before its submodule {path}", REMEDY)
        if isinstance(output, Mapping):
            return Body(path, tuple(taken[0]), taken[1], type(output), next(iter(output)), 0)
        length = len(output) if isinstance(output, tuple) else 1
        return Body(path, tuple(taken[0]), taken[1], None, "", length)

    def _taken(self, value: Any) -> Any:
        return self._given.get(id(value), value)


def answer_heads(body: nn.Module) -> None:
    """Let a submodule return the hidden states of the phase :class:`Head`, and compute them in others."""
    body.forward = MethodType(_forward, body)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    phase = PHASE.get()
    return phase.returned if isinstance(phase, Head) else type(self).forward(self, *args, **kwargs)


def head_logits(model: Any, body: Body, hidden: Tensor) -> Tensor:
    """Return the logits ``[rows, vocab_size]`` of hidden states ``[rows, width]``: what follows the body."""
    token_ids = torch.zeros(hidden.shape[0], 1, dtype=torch.int64, device=hidden.device)
    with running(Head(body.returned(hidden.unsqueeze(1)))):
        found = model.of.forward(model, input_ids=token_ids, use_cache=False, return_dict=True)
    logits: Tensor = found.logits
    return logits.reshape(-1, logits.shape[-1])
