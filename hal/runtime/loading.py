"""Making a model from a checkpoint: names and shapes are checked first, then each tensor goes straight to its place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hal.backend import Backend
from hal.errors import CheckpointError, ConfigError
from hal.nn import Attention, CausalLM, Embedding
from hal.runtime.checkpoint import Checkpoint
from hal.runtime.fitting import check_fit, check_tied
from hal.runtime.layers import put_layers
from hal.runtime.model_classes import check_model_class, find_model, make_model
from hal.runtime.places import Place, places_of
from hal.runtime.quantization import QuantizedLayers
from hal.runtime.staging import Staging

log = logging.getLogger("hal.runtime")

Progress = Callable[[int, int], None]
"""Told the bytes loaded so far, and the bytes in all."""


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
        ModelError: the model's class cannot be imported, or is none, or makes no whole model.
        DriverIncompatible: a layer of the backend's own does not fit the place of the one that it replaces.
        ClosedError: the backend is closed.
    """
    backend.uses.check_open()
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    asked = backend.config.dtype
    dtype = checkpoint.dtype if asked == "auto" else getattr(torch, asked)
    backend.check_dtype(dtype)
    model, quantized = _build(checkpoint, model_class)
    own_layers = put_layers(model, backend)
    used = {each.head_dim for each in model.modules() if isinstance(each, Attention)}
    if (dims := backend.limits.head_dims) and (others := sorted(used - set(dims))):
        raise ConfigError(
            f"the backend {backend.name} has no attention for head_dim {others[0]}",
            f"it takes {', '.join(map(str, dims))}; choose another backend",
        )
    places = dict(places_of(model))
    check_fit(checkpoint, model, places, quantized)
    check_tied(checkpoint, model)
    prepared = _fill(checkpoint, places, quantized, dtype, backend, progress)
    if _prepare_tied(model, backend) or prepared or own_layers:
        model.prepared_by = backend.name
    if left := [name for name, tensor in _tensors(model) if tensor.is_meta]:
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
    check_fit(checkpoint, model, dict(places_of(model)), quantized)
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
    model = make_model(check_model_class(model_class, "model_class"), checkpoint.model_config)
    return model, QuantizedLayers(model, checkpoint)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that the modules hold, plain attributes too, which torch knows nothing of."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def _fill(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
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
    place: Place,
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
