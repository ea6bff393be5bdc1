"""Replacement of a loaded model's weights, in the memory that graphs, compiled code and packed weights use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor

from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.checkpoint.tensor_names import renamed
from hal.checkpoint.validate import tensor_problems
from hal.checkpoint.weight_filling import LayerFilling
from hal.drivers.backend import Backend
from hal.errors import CheckpointError, ModelError, nearest
from hal.nn import CausalLM

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen(eq=False)
class LoadedWeights:
    """The record of a load.

    Attributes:
        layers: what was filled at once.
        dtype: the dtype of computation.
    """

    layers: tuple[LayerFilling, ...]
    dtype: torch.dtype

    @property
    def readers(self) -> dict[str, list[LayerFilling]]:
        """What reads a checkpoint tensor, by the tensor's name."""
        found: dict[str, list[LayerFilling]] = {}
        for layer in self.layers:
            for name in layer.sources:
                found.setdefault(name, []).append(layer)
        return found


def replace_tensors(
    model: CausalLM, backend: Backend, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> None:
    """Write new values into a model's weights; see :func:`hal.replace_weights`.

    Args:
        model: loaded on the backend; no step may be running.
        backend: the backend.
        tensors: whole tensors, by their names in the checkpoint.

    Raises:
        CheckpointError: a tensor does not fit.
        ModelError: :func:`hal.load_model` did not load the model.
    """
    loaded = model.loaded
    if not isinstance(loaded, LoadedWeights):
        raise ModelError(
            f"{type(model).__name__} was not loaded by hal.load_model, so its weights have no names",
            "copy into its parameters, or load it from a checkpoint",
        )
    readers = loaded.readers
    if not isinstance(tensors, Mapping):
        _write(model, loaded, backend, _checked(model, loaded, tensors))
        return
    given = renamed({name: tensor.detach() for name, tensor in tensors.items()}, model, readers)
    layers = [layer for layer in loaded.layers if not layer.sources.isdisjoint(given)]
    _check(model, loaded, layers, given)
    for layer in layers:
        if layer.quantized is not None:  # Its numbers may be invalid. Nothing is refused from here on.
            for name in layer.sources:
                layer.put(name, given[name], backend)
            layer.finish()
    _write(model, loaded, backend, ((name, each) for name, each in given.items() if name in readers))


def _write(model: CausalLM, loaded: LoadedWeights, backend: Backend, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write checked tensors into the layers that read them, each layer as soon as it has all."""
    readers, begun = loaded.readers, dict[LayerFilling, set[str]]()
    try:
        for name, tensor in tensors:
            for layer in readers[name]:
                missing = begun.setdefault(layer, set(layer.sources))
                missing.discard(name)
                layer.put(name, tensor, backend)
                if not missing:
                    del begun[layer]
                    layer.replace(backend)
    finally:
        for layer in begun:
            layer.release()
    if begun:
        layer, missing = next(iter(begun.items()))
        raise CheckpointError(
            f"the new tensors lack {min(missing)}, which {layer.bindings[0].full_name} holds together with "
            f"{min(layer.sources - missing)}; {type(model).__name__} is partly replaced",
            "pass all tensors of a merged or a quantized layer, and load the model again",
        )


def _checked(
    model: CausalLM, loaded: LoadedWeights, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by the names of the model, each after its name, shape and dtype were checked."""
    readers, seen = loaded.readers, set[str]()
    for given, tensor in tensors:
        ((name, values),) = renamed({given: tensor.detach()}, model, readers).items()
        if name.endswith(model.ignored) and name not in readers:
            continue
        problems = [] if name in readers else [f"{name} is not in the model ({nearest(name, readers)})"]
        problems += _tensor_problems(readers.get(name, []), {name: values})
        if name in seen:
            tied = {*model.tied, *model.tied.values()}
            if given not in tied:
                problems.append(f"{given} is given twice")
            elif not all(map(partial(_holds, name=name, values=values), readers[name])):
                problems.append(f"{given} is tied to another tensor, but their values differ")
        if problems:
            raise CheckpointError(
                f"the new tensors do not fit the loaded {type(model).__name__}, which is partly replaced: "
                f"{'; '.join(problems)}",
                "pass tensors with the names, shapes and dtypes of its checkpoint, and load the model again",
            )
        if name not in seen:
            seen.add(name)
            yield name, values


def _holds(layer: LayerFilling, name: str, values: Tensor) -> bool:
    """Return whether a layer holds the values of a checkpoint tensor as they are."""
    for filling in layer.fillings:
        held = getattr(layer.module, filling.name)
        for piece in (each for each in filling.pieces if each.source == name):
            part = held[tuple(slice(*each) for each in piece.target)]
            if not torch.equal(part, values[tuple(slice(*each) for each in piece.taken)].to(part)):
                return False
    return True


def _tensor_problems(layers: Iterable[LayerFilling], given: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield why tensors have not the shapes and dtypes of those that were loaded."""
    for name, tensor in given.items():
        if tensor.dtype not in _NAMES:
            yield f"{name} is {tensor.dtype}, which no checkpoint has"
    infos = {
        name: TensorInfo(Path(), tuple(tensor.shape), _NAMES[tensor.dtype])
        for name, tensor in given.items()
        if tensor.dtype in _NAMES
    }
    for layer in layers:
        for binding in layer.bindings:
            for piece in binding.pieces():
                if piece.source in infos:
                    yield from tensor_problems(infos[piece.source], piece, binding)


def _check(model: CausalLM, loaded: LoadedWeights, layers: list[LayerFilling], given: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors have the names, shapes and dtypes of those that were loaded."""
    problems = list(_tensor_problems(layers, given))
    for layer in layers:
        held = layer.bindings[0].full_name if layer.quantized is None else layer.path
        beside = min(layer.sources & given.keys())
        problems += [
            f"{name} is missing, which {held} holds together with {beside}"
            for name in sorted(layer.sources - given.keys())
        ]
    names = {*loaded.readers, *model.tied}
    problems += [
        f"{name} is not in the model ({nearest(name, names)})"
        for name in given
        if name not in names and not name.endswith(model.ignored)
    ]
    problems += _tied_problems(model, given, loaded.dtype)
    if problems := list(dict.fromkeys(problems)):
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(
            f"the new tensors do not fit the loaded {type(model).__name__}, which is unchanged: {shown}",
            "pass tensors with the names, shapes and dtypes of its checkpoint, all of a merged layer together",
        )


def _tied_problems(model: CausalLM, given: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    for name, source in model.tied.items():
        if name not in given:  # A tensor that is given by this name alone has the other's.
            continue
        if given[name].shape != given[source].shape:
            yield f"{name} is tied to {source}, but their shapes differ"
        elif not torch.equal(given[name].to(given[source].device, dtype), given[source].to(dtype)):
            yield f"{name} is tied to {source}, but their values differ"
