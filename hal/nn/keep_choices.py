"""The hooks of a model whose steps return or take what its layers choose."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hal.errors import ConfigError, ModelError
from hal.nn.choices import RUNNING, Choice, Choices, ChoosingStep, name_of_field
from hal.nn.model import CausalLM
from hal.step.model_batches import given_batch


def keep_choices(model: CausalLM, *, record: Collection[str] = (), replay: Collection[str] = ()) -> None:
    """Let the steps of a model return what its layers choose, or take it. Call it before its runner is made.

    The extra tensor ``experts`` has the experts of each token in each layer with routed experts, ``[tokens, layers,
    top_k]``, int32. The extra tensor ``positions`` has the positions that each token attends to, in each layer of
    sparse attention, ``[tokens, layers, selected]`` or ``[tokens, layers, heads, selected]``, int32, and then -1.

    To replay, the model's batches have the fields ``given_experts`` or ``given_positions``, ``[tokens, layers * ...]``,
    int32. A token chooses itself where they are -1, as in batches that are built without them. The weights of given
    experts are computed from the router's scores.

    Args:
        model: the model.
        record: the names of the extra tensors.
        replay: the names of what batches give.

    Raises:
        ConfigError: no layer of the model makes such a choice, layers differ in its shape, or ranks share its heads.
    """
    declared: dict[str, list[Choice]] = {}
    layers: list[tuple[Any, str]] = []
    for module in model.modules():
        if isinstance(choice := getattr(module, "chooses", None), Choice):
            declared.setdefault(choice.name, []).append(choice)
            layers.append((module, choice.name))
    for argument, names in (("record", record), ("replay", replay)):
        if isinstance(names, str) or any(each not in declared or len(set(declared[each])) > 1 for each in names):
            known = sorted(name for name, each in declared.items() if len(set(each)) == 1)
            chosen = ", ".join(known) or "nothing that hal computes"
            raise ConfigError(
                f"{argument} is {names!r:.70}; layers of {type(model).__name__} choose {chosen}",
                f"pass a list of these names: {', '.join(known)}" if known else f"leave {argument} out",
            )
    kinds = {name: declared[name][0] for name in dict.fromkeys((*record, *replay))}
    counts = {name: len(declared[name]) for name in kinds}
    kept = Choices(tuple(record), tuple(replay), kinds, counts, model.max_length)
    for layer, name in layers:
        layer.kept_choice = name if name in kinds else None
    model.choices, model.extra = kept, (*model.extra, *kept.record)
    base: Any = model.batch_type
    for name in kept.replay:
        base = given_batch(base, name_of_field(name), math.prod(kept.shape(name)))
    model.batch_type = base
    model.register_forward_pre_hook(_begin_step)
    model.register_forward_hook(_end_step, always_call=True)


def _begin_step(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    kept: Any = model.choices
    given = {}
    for name in kept.replay:
        whole: Tensor = getattr(arguments[0], name_of_field(name))
        given[name] = iter(whole.unflatten(1, (kept.layers[name], -1)).unbind(1))
    RUNNING.set(ChoosingStep({name: [] for name in kept.kinds}, given))


def _end_step(model: nn.Module, arguments: tuple[Any, ...], found: Any) -> Any:
    step, kept = RUNNING.get(), model.choices
    RUNNING.set(None)
    if step is None or found is None:  # The model's forward raised.
        return None
    assert isinstance(kept, Choices)
    for name in kept.kinds:
        if missing := kept.layers[name] - len(step.found[name]):
            raise ModelError(
                f"{missing} of {kept.layers[name]} layers of {type(model).__name__} did not use the {name} that "
                "hal.nn.chosen returns",
                "let each module that declares `chooses` call it once in a step",
            )
    stacked = [torch.stack(step.found[name], 1) for name in kept.record]
    return (*(found if isinstance(found, tuple) else (found,)), *stacked) if stacked else None
