"""Replacement of a loaded model's weights, in the memory that graphs, compiled code and packed weights use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from hal.checkpoint.quantized_layers import QuantizedLayers
from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.checkpoint.tensor_names import renamed
from hal.checkpoint.validate import tensor_problems
from hal.checkpoint.weight_bindings import Binding, Piece
from hal.checkpoint.weight_filling import Refilling
from hal.drivers.backend import Backend
from hal.errors import CheckpointError, ModelError, nearest
from hal.nn import CausalLM

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen(eq=False)
class LoadedWeights:
    """The record of a load.

    Attributes:
        bindings: of all tensors, with their whole shapes.
        quantized: the quantized layers.
        side_tensors: the names of all checkpoint tensors of quantized layers, other than weights.
        dtype: the dtype of computation.
    """

    bindings: tuple[Binding, ...]
    quantized: QuantizedLayers
    side_tensors: frozenset[str]
    dtype: torch.dtype


def replace_tensors(model: CausalLM, backend: Backend, tensors: Mapping[str, Tensor]) -> None:
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
    known = {piece.source for binding in loaded.bindings for piece in binding.pieces()} | loaded.side_tensors
    given = renamed({name: tensor.detach() for name, tensor in tensors.items()}, model, known)
    bindings, layers = _touched(loaded, given)
    _check(model, loaded, bindings, layers, given)
    tied = set(model.tied.values())
    filling = [Refilling(binding, loaded.dtype, backend, tied) for binding in bindings]
    pieces = [(each, piece) for each in filling for piece in each.pieces]
    quantized = loaded.quantized
    try:
        for name, tensor in given.items():
            if quantized.layer_of(name) is not None:
                quantized.keep(name, tensor.cpu())
        for each, piece in pieces:
            if each.module in layers:
                quantized.observe(piece.source, _taken(piece, given).cpu())
        computed = list(quantized.computed(layers))
    finally:
        quantized.forget()
    for new in computed:
        new.check_replaces()
    for each, piece in pieces:  # Nothing is refused from here on.
        each.put_again(piece, _taken(piece, given))
    for new in computed:
        new.replace(backend, loaded.dtype)


def _touched(loaded: LoadedWeights, given: Mapping[str, Tensor]) -> tuple[list[Binding], set[nn.Module]]:
    """Return the bindings that read one of the tensors, and the quantized layers that one belongs to."""
    quantized = loaded.quantized.modules
    layers = {layer for name in given if (layer := loaded.quantized.layer_of(name)) is not None}
    bindings = [each for each in loaded.bindings if any(piece.source in given for piece in each.pieces())]
    layers |= {each.module for each in bindings if each.module in quantized}
    read = [each for each in loaded.bindings if each.weight.sources and (each in bindings or each.module in layers)]
    return read, layers


def _check(
    model: CausalLM, loaded: LoadedWeights, bindings: list[Binding], layers: set[nn.Module], given: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError unless the tensors have the names, shapes and dtypes of those that were loaded."""
    problems = [
        f"{name} is {tensor.dtype}, which no checkpoint has"
        for name, tensor in given.items()
        if tensor.dtype not in _NAMES
    ]
    infos = {
        name: TensorInfo(Path(), tuple(tensor.shape), _NAMES[tensor.dtype])
        for name, tensor in given.items()
        if tensor.dtype in _NAMES
    }
    for binding in bindings:
        pieces = binding.pieces()
        for piece in pieces:
            if piece.source not in given:
                others = next((each.source for each in pieces if each.source in given), "another tensor of its layer")
                problems.append(f"{piece.source} is missing, which {binding.full_name} holds together with {others}")
            elif piece.source in infos:
                problems += tensor_problems(infos[piece.source], piece, binding)
    problems += loaded.quantized.problems(infos, layers)
    names = {piece.source for binding in loaded.bindings for piece in binding.pieces()}
    names |= {*model.tied, *loaded.side_tensors}
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


def _taken(piece: Piece, given: Mapping[str, Tensor]) -> Tensor:
    return given[piece.source][tuple(slice(*each) for each in piece.taken)]
