"""Choices of a model's layers that are given for the tokens of texts, such as those of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hal.errors import BatchError, ConfigError
from hal.nn import CausalLM, Choice
from hal.nn.choices import name_of_field


def fields_of_choices(model: CausalLM, choices: Sequence[Any], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the fields of batches that replay choices, for each sequence, ``[length, ...]``, int32.

    Args:
        model: the model.
        choices: for each sequence, tensors ``[tokens, layers, ...]`` of integers by name, as recorded. The tokens
            beyond choose themselves.
        lengths: the number of tokens of each sequence.

    Raises:
        ConfigError: the model does not replay choices of a name.
        BatchError: there are not as many as sequences, their names differ, or a tensor has another shape or numbers out
            of range.
    """
    given = list(choices) if isinstance(choices, Sequence) else []
    if len(given) != len(lengths) or not all(isinstance(each, Mapping) for each in given):
        raise BatchError(
            f"choices is {choices!r:.70}, for {len(lengths)} sequences",
            "pass a mapping for each, such as Completion.choices",
        )
    if any(each.keys() != given[0].keys() for each in given):
        raise BatchError(
            f"choices have the names {', '.join(sorted({name for each in given for name in each}))}, and not all for "
            "each sequence",
            "pass the same names for each",
        )
    replayed = () if model.choices is None else model.choices.replay
    for name in given[0] if given else ():
        if name not in replayed:
            raise ConfigError(
                f"choices has {name!r}, and the model replays {', '.join(replayed) or 'nothing'}",
                f"load the model with replay=[{name!r}]",
            )
    return [
        {name_of_field(name): _rows(model, name, tensor, length) for name, tensor in each.items()}
        for each, length in zip(given, lengths, strict=True)
    ]


def _rows(model: CausalLM, name: str, tensor: Any, length: int) -> Tensor:
    assert model.choices is not None
    shape, kind = model.choices.shape(name), model.choices.kinds[name]
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.shape[1:] != shape:
        what = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"{tensor!r:.70}"
        raise BatchError(
            f"the {name} to replay are {what}",
            f"pass integers of the shape {['tokens', *shape]}, as a model of the same layers records them",
        )
    if len(tensor) > length:
        raise BatchError(
            f"there are {name} for {len(tensor)} tokens, and the sequence has {length}",
            "pass those of the prompt and its continuation",
        )
    numbers = tensor.cpu().to(torch.int32)
    _check_numbers(kind, numbers)
    flat = numbers.flatten(1)
    return torch.cat([flat, flat.new_full((length - len(flat), flat.shape[1]), -1)])


def _check_numbers(kind: Choice, numbers: Tensor) -> None:
    """Raise BatchError unless numbers, ``[tokens, layers, ...]``, are what the tokens can choose."""
    if kind.bound is None:
        own = torch.arange(len(numbers)).view(-1, *[1] * (numbers.dim() - 1))
        right = (numbers >= -1) & (numbers <= own) & (numbers[..., :1] >= 0)
        limit = "from 0 to the token's own, then -1"
    else:
        right = (numbers >= 0) & (numbers < kind.bound)
        right[..., 1:] &= numbers.sort(-1).values.diff(dim=-1) > 0
        limit = f"from 0 to {kind.bound - 1}, each once"
    if not bool(right.all()):
        token, layer = (~right).nonzero()[0].tolist()[:2]
        raise BatchError(
            f"the {kind.name} of token {token} in layer {layer} are {numbers[token, layer].tolist()!s:.70}",
            f"pass {kind.name} {limit}",
        )
