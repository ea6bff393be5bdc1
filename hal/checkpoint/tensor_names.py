"""Names of a checkpoint's tensors that differ from the model's: without the prefix of the base model, and others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import attrs

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.weight_bindings import sources_of
from hal.errors import CheckpointError
from hal.nn import CausalLM, GroupedLinear, MergedLinear

T = TypeVar("T")


def named_by_model(checkpoint: Checkpoint, model: CausalLM) -> Checkpoint:
    """Return the checkpoint with the model's names of its tensors, and let the model read merged ones as they are.

    Args:
        model: on the meta device, without quantized layers; changed in place where the checkpoint has the projections
            of all experts as one tensor, or the parts of a merged layer as one layer.
    """
    sources = sources_of(model)
    grouped = {path: each for path, each in model.named_modules() if isinstance(each, GroupedLinear)}
    merged = {path: each for path, each in model.named_modules() if isinstance(each, MergedLinear)}
    known = sources | grouped.keys() | {f"{path}.weight" for path in merged}
    stored = renamed({name: name for name in checkpoint.tensors}, model, known)
    for path, layer in grouped.items():
        if path in stored:
            layer.fused = path.rpartition(".")[2]
            if layer.by_shape and checkpoint.tensors[stored[path]].shape == tuple(layer.weight.shape):
                layer.transposed = False
    layers = {name.rpartition(".")[0] for name in stored}
    for path, each in merged.items():
        each.merged = path in layers
    infos = checkpoint.tensors
    tensors = {name: attrs.evolve(infos[old], stored=infos[old].stored or old) for name, old in stored.items()}
    return attrs.evolve(checkpoint, tensors=tensors)


def renamed(given: Mapping[str, T], model: CausalLM, known: Collection[str]) -> dict[str, T]:
    """Return values by the model's names of tensors. A name that the model does not know is kept.

    Args:
        given: by the names that a checkpoint may have.
        model: its attributes ``base_name``, ``other_names`` and ``tied`` declare the names.
        known: the model's names.
    """
    spell, found = speller(model, known), dict[str, T]()
    for name, value in given.items():
        spelled = spell(name)
        # A name that another tensor has, too, stays, and is refused as superfluous.
        found[name if spelled in given or spelled in found else spelled] = value
    for name, source in model.tied.items():
        if name in found and source not in found:
            found[source] = found.pop(name)
    return found


def speller(model: CausalLM, known: Collection[str]) -> Callable[[str], str]:
    """Return a function that returns the model's name of a tensor; for the arguments, see :func:`renamed`."""
    layers = {name.rpartition(".")[0] for name in known}

    def spell(name: str) -> str:
        if name in known:
            return name
        spellings = list(_spellings(name, model))
        exact = next((each for each in spellings if each in known), None)
        if exact is not None or name.rpartition(".")[0] in layers:
            return exact or name
        return next((each for each in spellings if each.rpartition(".")[0] in layers), name)

    return spell


def check_no_fused_experts(model: CausalLM, path: object) -> None:
    """Raise CheckpointError if a model reads fused experts from the checkpoint at ``path``."""
    for name, layer in model.named_modules():
        if isinstance(layer, GroupedLinear) and layer.fused is not None:
            raise CheckpointError(
                f"{path} has the projections of all experts in one tensor, {name}, and hal quantizes those that have "
                "one for each expert",
                "save it with transformers and save_original_format=True, which is the default, and quantize that",
            )


def _spellings(name: str, model: CausalLM) -> Iterator[str]:
    """Yield the names that a tensor may have in the model."""
    prefix = f"{model.base_name}."
    others = [name.replace(old, new) for old, new in model.other_names.items() if old in name]
    every = name
    for old, new in model.other_names.items():
        every = every.replace(old, new)
    for each in dict.fromkeys((name, *others, every)):
        yield each
        yield each.removeprefix(prefix)
        yield prefix + each
