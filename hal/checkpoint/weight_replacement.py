"""Replacement of a loaded model's weights, in the memory that graphs, compiled code and packed weights use."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.gguf.gguf_files import GgufFiles
from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.checkpoint.tensor_names import renamed, speller
from hal.checkpoint.validate import tensor_problems, value_problems
from hal.checkpoint.weight_arrival import WeightArrival
from hal.checkpoint.weight_bindings import Binding, Piece
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
        checkpoint: the checkpoint that has the weights; None after others replaced them.
        shared: the names of tensors that the model has no more, because it uses another model's.
        restore: takes memory again for weights that sleep; None while none do.
    """

    layers: tuple[LayerFilling, ...]
    dtype: torch.dtype
    checkpoint: Checkpoint | None = None
    shared: frozenset[str] = frozenset()
    restore: Callable[[Backend], None] | None = None

    def without(self, *modules: nn.Module) -> LoadedWeights:
        """Return the record without modules that are no part of the model any more, so that they can be freed."""
        left = tuple(each for each in self.layers if each.module not in modules)
        gone = {name for each in self.layers if each.module in modules for name in each.pieces}
        return attrs.evolve(self, layers=left, shared=self.shared | gone)


class _Replacement:
    """A replacement of weights.

    Attributes:
        known: the layer, the piece and the binding of each checkpoint tensor, also those of other ranks, by its name.
        arrival: brings tensors into the form of the checkpoint.
        written: the layers that have new values.
    """

    def __init__(self, model: CausalLM, backend: Backend, loaded: LoadedWeights) -> None:
        self._model, self._backend, self._loaded = model, backend, loaded
        self.known: dict[str, list[tuple[LayerFilling, Piece, Binding]]] = {}
        for layer in loaded.layers:
            for binding in layer.bindings:
                for piece in binding.pieces():
                    self.known.setdefault(piece.source, []).append((layer, piece, binding))
        self.arrival = WeightArrival(model, loaded.layers, self.known)
        self.written: set[LayerFilling] = set()

    def check(self, given: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError unless tensors have the names, shapes, dtypes and numbers of those that were loaded."""
        layers = dict.fromkeys(layer for name in given for layer, *_ in self.known.get(name, ()))
        problems = [problem for name, tensor in given.items() for problem in self._problems(name, tensor)]
        for layer in layers:
            held = layer.bindings[0].full_name if layer.quantized is None else layer.path
            beside = next((name for name in layer.pieces if name in given), "another tensor of its layer")
            missing = sorted(layer.pieces.keys() - given.keys())
            problems += [f"{name} is missing, which {held} holds together with {beside}" for name in missing]
        problems += _tied_problems(self._model, given, self._loaded.dtype)
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise CheckpointError(
                f"the new tensors do not fit the loaded {type(self._model).__name__}, which is unchanged: {shown}",
                "pass tensors with the names, shapes and dtypes of its checkpoint, all of a merged layer together",
            )
        for layer in layers:
            if layer.quantized is not None:
                for name in layer.pieces:
                    layer.put(name, given[name], self._backend)
                layer.finish()

    def checked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by the model's names, each after a check of its name, shape and dtype."""
        model, spell, seen = self._model, speller(self._model, self.arrival.names), set[str]()
        stored = self.arrival.stored
        for given, values in (pair for name, each in tensors for pair in stored(spell(name), each.detach())):
            name = model.tied.get(given, given)
            problems = list(self._problems(name, values))
            if name in seen and name not in model.tied.values():
                problems.append(f"{given} is given twice")
            elif name in seen and not self._holds(name, values):
                problems.append(f"{given} is tied to another tensor, but their values differ")
            if problems:
                raise CheckpointError(
                    f"the new tensors do not fit the loaded {type(model).__name__}: {'; '.join(problems)}",
                    "pass tensors with the names, shapes and dtypes of its checkpoint",
                )
            if name not in seen:
                seen.add(name)
                yield name, values

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write checked tensors into the layers that read them, each layer as soon as it has all."""
        begun: dict[LayerFilling, set[str]] = {}
        try:
            for name, tensor in tensors:
                for layer in dict.fromkeys(layer for layer, *_ in self.known.get(name, ()) if name in layer.pieces):
                    missing = begun.setdefault(layer, set(layer.pieces))
                    missing.discard(name)
                    layer.put(name, tensor, self._backend)
                    if not missing:
                        del begun[layer]
                        layer.replace(self._backend)
                        self.written.add(layer)
        finally:
            for layer in begun:
                layer.release()
        for layer, missing in begun.items():
            raise CheckpointError(
                f"{min(missing)} is missing, which {layer.bindings[0].full_name} holds together with "
                f"{min(layer.pieces.keys() - missing)}",
                "pass all tensors of a merged or a quantized layer",
            )

    def _problems(self, name: str, tensor: Tensor) -> Iterator[str]:
        """Yield why a tensor has not the name, shape or dtype of one that was loaded."""
        if name not in self.known and name not in self._model.tied:
            if not self._model.ignores(name) and name not in self._loaded.shared:
                yield f"{name} is not in the model ({nearest(name, {*self.known, *self._model.tied})})"
        elif tensor.dtype not in _NAMES:
            yield f"{name} is {tensor.dtype}, which no checkpoint has"
        else:
            info = TensorInfo(Path(), tuple(tensor.shape), _NAMES[tensor.dtype])
            for _, piece, binding in self.known.get(name, ()):
                yield from (problems := list(tensor_problems(info, piece, binding)))
                if not problems:
                    yield from (f"{name} {each}" for each, _ in value_problems(tensor, binding.weight.checks))

    def _holds(self, name: str, values: Tensor) -> bool:
        """Return whether a layer holds the values of a checkpoint tensor, which no driver prepares."""
        for layer in dict.fromkeys(layer for layer, *_ in self.known[name]):
            for filling, piece in layer.pieces.get(name, ()):
                held = getattr(layer.module, filling.name)[tuple(slice(*each) for each in piece.target)]
                if not torch.equal(held, values[tuple(slice(*each) for each in piece.taken)].to(held)):
                    return False
        return True


def loaded_weights(model: CausalLM) -> LoadedWeights:
    """Return the record of a model's load.

    Raises:
        ModelError: :func:`hal.load_model` did not load it.
    """
    if not isinstance(model.loaded, LoadedWeights):
        raise ModelError(
            f"{type(model).__name__} was not loaded by hal.load_model, so its weights have no names",
            "copy into its parameters, or load it from a checkpoint",
        )
    return model.loaded


def replace_tensors(
    model: CausalLM, backend: Backend, tensors: Checkpoint | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> None:
    """Write new values into a model's weights; see :func:`hal.replace_weights`.

    Args:
        model: loaded on the backend; no step may be running.
        tensors: whole tensors, by their names in the checkpoint; or a checkpoint that has them.

    Raises:
        CheckpointError: a tensor does not fit.
        ModelError: :func:`hal.load_model` did not load the model.
    """
    loaded = loaded_weights(model)
    replacement, checkpoint = _Replacement(model, backend, loaded), None
    if isinstance(tensors, Checkpoint):
        checkpoint, tensors = tensors, tensors.read(tensors.tensors)
        if isinstance(checkpoint.files, GgufFiles) and checkpoint is not loaded.checkpoint:
            raise CheckpointError(
                f"{checkpoint.path} is a GGUF file, whose weights cannot replace those of a loaded model",
                "load it with hal.load_model, for another runner",
            )
    if isinstance(tensors, Mapping):
        arrival = replacement.arrival
        named = renamed({name: tensor.detach() for name, tensor in tensors.items()}, model, arrival.names)
        given = dict(pair for name, tensor in named.items() for pair in arrival.stored(name, tensor))
        replacement.check(given)  # Nothing is refused from here on.
        model.loaded = attrs.evolve(loaded, checkpoint=None)
        replacement.write(given.items())
        return
    model.loaded = attrs.evolve(loaded, checkpoint=None)
    try:
        replacement.write(replacement.checked(tensors))
    except CheckpointError as error:
        problem = f"{error.problem}; the model may be partly replaced"
        raise CheckpointError(problem, f"{error.remedy}, and load the model again") from None
    finally:
        if isinstance(tensors, Generator):
            tensors.close()  # It may have to receive what another process sends.
    if checkpoint is not None and replacement.written.issuperset(loaded.layers):
        model.loaded = attrs.evolve(loaded, checkpoint=checkpoint)


def _tied_problems(model: CausalLM, given: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    for name, source in model.tied.items():
        if name not in given:  # A tensor that is given by this name alone has the other's.
            continue
        if given[name].shape != given[source].shape:
            yield f"{name} is tied to {source}, but their shapes differ"
        elif not torch.equal(given[name].to(given[source].device, dtype), given[source].to(dtype)):
            yield f"{name} is tied to {source}, but their values differ"
