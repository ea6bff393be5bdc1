"""Making a model from a checkpoint: names and shapes are checked first, then each tensor goes straight to its place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from hal.backend import Backend
from hal.errors import CheckpointError, ConfigError
from hal.nn import CausalLM, Embedding, Linear, MergedLinear, QuantizedLinear
from hal.nn.linear import named_parts
from hal.runtime.checkpoint import Checkpoint
from hal.runtime.checkpoint_files import TensorInfo
from hal.runtime.layers import put_layers
from hal.runtime.model_classes import check_model_class, find_model
from hal.runtime.quantization import QuantizedLayers
from hal.runtime.staging import Staging

log = logging.getLogger("hal.runtime")

Progress = Callable[[int, int], None]
"""Told the bytes loaded so far, and the bytes in all."""


@attrs.frozen
class _Place:
    """Where a checkpoint's tensor goes: the rows of a parameter from ``start`` on; all of it, unless it is merged.

    The weight of a :class:`QuantizedLinear`, which is a buffer, counts as a parameter here.
    """

    module: nn.Module
    parameter: str
    start: int
    shape: tuple[int, ...]

    @property
    def quantized(self) -> bool:
        return isinstance(self.module, QuantizedLinear)

    @property
    def projects(self) -> bool:
        """Whether it is the weight of a projection, which a backend may bring into another form."""
        return isinstance(self.module, Linear | QuantizedLinear) and self.parameter == "weight"

    def dtype(self, computing: torch.dtype) -> torch.dtype:
        """What it is held in, in a model that computes in ``computing``."""
        return torch.int8 if self.quantized else computing

    def put(self, tensor: Tensor) -> Tensor:
        """Make ``tensor`` the parameter, or the buffer."""
        stored = tensor if self.quantized else nn.Parameter(tensor, requires_grad=False)
        setattr(self.module, self.parameter, stored)
        return stored


def load_model(
    path: str | Path | Checkpoint,
    backend: Backend,
    *,
    model_class: type[CausalLM] | None = None,
    progress: Progress | None = None,
) -> CausalLM:
    """Load a checkpoint onto a backend's device.

    What a checkpoint holds in int8 stays so: its linear layers are :class:`hal.nn.QuantizedLinear` in the model.
    Where the backend has layers of its own (``Backend.layers``), the model gets those, and runs on that backend only.

    Args:
        path: the checkpoint's folder.
        backend: its config's ``dtype`` decides what the weights are held in, and computed with.
        model_class: the model to build; None takes the one registered for the checkpoint's architecture.
        progress: called as weights arrive.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, unsafe, or does not fit its architecture.
        ConfigError: its config, or the dtype, is not one that the model or the backend can do.
        ModelError: the model's class cannot be imported, or is none.
        DriverIncompatible: a layer of the backend's own does not fit the place of the one that it replaces.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    asked = backend.config.dtype
    dtype = checkpoint.dtype if asked == "auto" else getattr(torch, asked)
    backend.check_dtype(dtype)
    model, quantized = _build(checkpoint, model_class)
    own_layers = put_layers(model, backend)
    if (dims := backend.limits.head_dims) and model.head_dim not in dims:
        raise ConfigError(
            f"the backend {backend.name} has no attention for head_dim {model.head_dim}",
            f"it takes {', '.join(map(str, dims))}; choose another backend",
        )
    places = dict(_places(model))
    _check(checkpoint, model, places, quantized)
    prepared = _fill(checkpoint, places, quantized, dtype, backend, progress)
    if _prepare_tied(model, backend) or prepared or own_layers:
        model.prepared_by = backend.name
    if left := [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]:
        raise CheckpointError(f"{type(model).__name__} keeps {', '.join(left)}, which no checkpoint fills", "make it a "
                              "parameter, or compute it in forward")  # fmt: skip
    return model.eval()


def build_model(checkpoint: Checkpoint, model_class: type[CausalLM] | None = None) -> CausalLM:
    """The checkpoint's model on the meta device: without values, its quantised layers in place.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit its architecture.
        ConfigError: its config is not one that the model can do.
        ModelError: the model's class cannot be imported, or is none.
    """
    model, quantized = _build(checkpoint, model_class)
    _check(checkpoint, model, dict(_places(model)), quantized)
    return model


def _build(checkpoint: Checkpoint, model_class: type[CausalLM] | None) -> tuple[CausalLM, QuantizedLayers]:
    layers = checkpoint.config.get("num_hidden_layers")
    if type(layers) is int and layers > len(checkpoint.tensors):  # before so many are built
        raise CheckpointError(
            f"config.json in {checkpoint.path} says num_hidden_layers {layers}, and there are "
            f"{len(checkpoint.tensors)} tensors for them",
            "check that config.json and the weights belong together",
        )
    if model_class is None:
        model_class = find_model(checkpoint.architecture)
    with torch.device("meta"):
        model = check_model_class(model_class, "model_class").from_config(checkpoint.model_config)
    return model, QuantizedLayers(model, checkpoint)


def _places(model: nn.Module) -> Iterator[tuple[str, _Place]]:
    """Every checkpoint tensor that the model takes, and where it goes."""
    for path, module in model.named_modules():
        # What a quantised layer has beside its weight is not read as it is.
        quantized = isinstance(module, QuantizedLinear)
        tensors = [("weight", module.weight)] if quantized else module.named_parameters(recurse=False)
        for name, tensor in tensors:
            if not isinstance(module, MergedLinear | QuantizedLinear) or not module.parts:
                yield f"{path}.{name}".lstrip("."), _Place(module, name, 0, tuple(tensor.shape))
                continue
            start = 0
            for layer, rows in named_parts(path, module):
                yield f"{layer}.{name}", _Place(module, name, start, (rows, *tensor.shape[1:]))
                start += rows


def _check(checkpoint: Checkpoint, model: CausalLM, places: Mapping[str, _Place], quantized: QuantizedLayers) -> None:
    tensors = checkpoint.tensors
    problems = [f"{name} is missing" for name in places if name not in tensors]
    problems += [
        f"{name} is {list(tensors[name].shape)}, not {list(place.shape)}"
        for name, place in places.items()
        if name in tensors and tensors[name].shape != place.shape
    ]
    problems += [
        f"{name} is {tensors[name].dtype}, and {'int8' if place.quantized else 'a floating-point number'} was expected"
        for name, place in places.items()
        if name in tensors and not _fits(tensors[name], place)
    ]
    problems += quantized.problems(tensors)
    known = {*places, *model.tied, *quantized.names()}
    extra = [name for name in tensors if name not in known]
    problems += [f"{name} is not the model's" for name in extra if not name.endswith(model.ignored)]
    problems += [
        f"{name} repeats {source}, yet their shapes differ"
        for name, source in model.tied.items()
        if name in tensors and tensors[name].shape != places[source].shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        undescribed = checkpoint.quantization is None and any(info.dtype == "I8" for info in tensors.values())
        raise CheckpointError(
            f"the tensors in {checkpoint.path} do not fit {checkpoint.architecture}: {shown}",
            "check that config.json and the weights belong together"
            + ("; nothing in the folder says how its int8 weights are quantised" if undescribed else ""),
        )


def _fits(tensor: TensorInfo, place: _Place) -> bool:
    return tensor.dtype == "I8" if place.quantized else tensor.is_floating_point


def _fill(
    checkpoint: Checkpoint,
    places: Mapping[str, _Place],
    quantized: QuantizedLayers,
    dtype: torch.dtype,
    backend: Backend,
    progress: Progress | None,
) -> bool:
    """Whether the backend changed the form of any weight."""
    changed = False
    sizes = {name: torch.Size(place.shape).numel() * place.dtype(dtype).itemsize for name, place in places.items()}
    sizes |= {name: checkpoint.tensors[name].nbytes for name in quantized.names() & set(checkpoint.tensors)}
    done, total = 0, sum(sizes.values())
    staging = {kind: Staging(kind, backend) for kind in (dtype, torch.int8)}
    parts = Counter((place.module, place.parameter) for place in places.values())
    for name, values in checkpoint.read(sizes):
        quantized.keep(name, values)
        if name in places:
            changed |= _put(places[name], values, dtype, backend, staging, parts)
        done += sizes[name]
        if progress is not None:
            progress(done, total)
    return quantized.finish(backend, dtype) or changed


def _put(
    place: _Place,
    values: Tensor,
    dtype: torch.dtype,
    backend: Backend,
    staging: Mapping[torch.dtype, Staging],
    parts: Counter[tuple[nn.Module, str]],
) -> bool:
    """Whether the weight is complete with it, and the backend changed its form."""
    tensor, kind = getattr(place.module, place.parameter), place.dtype(dtype)
    if tensor.is_meta:  # the first of its parts to arrive
        take = staging[kind].take if place.projects else partial(torch.empty, dtype=kind, device=backend.device.torch)
        tensor = place.put(take(tensor.shape))
    tensor.data[place.start : place.start + place.shape[0]].copy_(values)
    parts[place.module, place.parameter] -= 1
    if not place.projects or parts[place.module, place.parameter]:
        return False
    weight = tensor.data
    prepared = backend.prepare_weight(weight, shared=False)
    place.put(staging[kind].replace(weight, prepared))
    return prepared is not weight


def _prepare_tied(model: CausalLM, backend: Backend) -> bool:
    """An output projection that is an embedding's table may be prepared beside it; whether any was."""
    changed = False
    for source in set(model.tied.values()):
        module = model.get_submodule(source.rpartition(".")[0])
        if isinstance(module, Embedding):
            table = module.weight.data
            prepared = backend.prepare_weight(table, shared=True)
            if prepared is not table:
                module.projection, changed = prepared, True
                log.info("%s is held twice, as a table and prepared for projecting: %d MiB more", source,
                         prepared.numel() * prepared.element_size() >> 20)  # fmt: skip
    return changed
