"""Loading of a model from a checkpoint: names and shapes are validated first, then each tensor is read in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hal.checkpoint.adapters import make_room
from hal.checkpoint.cache_dtype import check_cache_dtype, check_scales, quantize_cache
from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.driver_layers import put_layers
from hal.checkpoint.gguf.gguf_files import GgufFiles
from hal.checkpoint.gguf.packed_layers import pack_layers
from hal.checkpoint.model_registry import AUTO, check_model_class, find_model_class, make_model
from hal.checkpoint.quantized_layers import AUTO as AUTO_WEIGHTS
from hal.checkpoint.quantized_layers import TARGETS, QuantizedLayer, quantize_layers
from hal.checkpoint.safetensors_files import DTYPES, TensorSlice
from hal.checkpoint.tensor_names import named_by_model
from hal.checkpoint.validate import check_fit, check_tied, check_values
from hal.checkpoint.weight_bindings import Binding, bindings_of, naming_counts, set_tensor
from hal.checkpoint.weight_filling import Filling, LayerFilling, WeightBuffers, layer_fillings
from hal.checkpoint.weight_replacement import LoadedWeights
from hal.config.settings import CacheDType, ExpertsMode, ParallelConfig, QuantizedWeights
from hal.config.untrusted_files import is_there
from hal.device.device import UNLIMITED, Limits
from hal.device.group import SOLO, Group
from hal.drivers.backend import Backend
from hal.errors import CheckpointError, ConfigError
from hal.nn import Attention, CausalLM, Experts
from hal.parallel.mesh import Mesh
from hal.quantization.forms import name_of

log = logging.getLogger("hal.checkpoint")

LARGE_WEIGHT_FRACTION = 128
"""A weight is large if it has more than one part in so many of the bytes of all."""
LARGEST_BUFFER_BYTES = 32 << 20
"""Larger weights are prepared in memory of their own, whatever their part of all."""
HEAD = "lm_head.weight"
EMBEDDING_MODULES = "modules.json"
"""The file of sentence-transformers in the folder of an embedding model."""
CACHE_TRIMS = 16
"""How often a load gives freed memory back, which would count at the peak."""

Progress = Callable[[int, int], None]
"""A callback that receives the bytes loaded so far and the bytes in total."""


def load_model(
    path: str | Path | Checkpoint,
    backend: Backend,
    *,
    model_class: type[CausalLM] | None = None,
    progress: Progress | None = None,
    adapters: bool = True,
) -> CausalLM:
    """Load a checkpoint onto a backend's device.

    Quantized layers stay quantized: they hold the checkpoint's form. If the backend replaces layers
    (``Backend.layers``), the model contains the replacements, and runs on that backend only.

    Args:
        path: the checkpoint's folder.
        backend: the ``dtype`` of its config is the dtype of weights and computation.
        model_class: the model class; None selects the one that ``model_source`` of the backend's config has for the
            checkpoint's architecture.
        progress: called as weights are loaded.
        adapters: whether it gets the room for adapters that the backend's configuration asks for.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, unsafe, or does not fit its architecture.
        ConfigError: the model or the backend does not support its config or the dtype.
        ModelError: the model class cannot be imported, is not a CausalLM, or builds an incomplete model.
        DriverIncompatible: a layer of the backend does not fit the layer that it replaces.
        ClosedError: the backend is closed.
    """
    backend.uses.check_open()
    opened = checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    asked = backend.config.dtype
    dtype = checkpoint.dtype if asked == "auto" else getattr(torch, asked)
    backend.check_dtype(dtype)
    config = backend.config
    model, checkpoint, quantized = _build(
        checkpoint,
        model_class,
        config.model_source,
        config.quantized_weights,
        config.cache.dtype,
        backend.limits,
        dtype,
    )
    if config.numerics.invariant and model.recognize:
        raise ConfigError(
            f"numerics.invariant is true, and {checkpoint.architecture} is computed by torch's functions, whose bits "
            "depend on what a step and a compiler compute together",
            "set numerics.invariant to false, or use a model of hal's, with model_source hal",
            key="model_source",
        )
    check_cache_dtype(model, backend)
    own_layers = put_layers(model, backend)
    used = {each.head_dim for each in model.modules() if isinstance(each, Attention)}
    if (dims := backend.limits.head_dims) and (others := sorted(used - set(dims))):
        raise ConfigError(
            f"the backend {backend.name} has no attention kernel for head_dim {others[0]}",
            f"it supports {', '.join(map(str, dims))}; choose another backend",
        )
    mode, mesh = backend.config.parallel.experts, backend.mesh
    if mode != "split" and mesh.size > 1:
        distribute_experts(model, mode, mesh)
    bindings = _stored_bindings(model, quantized, checkpoint, mesh.tensor)
    check_fit(checkpoint, model, bindings)
    check_tied(checkpoint, model, dtype)
    _log_conversion(quantized, dtype)
    for part in () if checkpoint.quantization is None else checkpoint.quantization[1].unapplied:
        log.warning("activations stay in floating point, although %s has %s", checkpoint.path, part)
    tied = set(model.tied.values())
    with naming_counts(bindings):
        layers = layer_fillings(bindings, quantized, dtype, mesh, checkpoint.tensors, tied)
    check_values(checkpoint, layers)
    if mesh.tensor.size > 1:
        with naming_counts(bindings):
            split_model(model, mesh.tensor)
    for each in bindings:
        if each.weight.values:
            constant = torch.tensor(each.weight.values, dtype=each.dtype(dtype), device=backend.device.torch)
            set_tensor(each.module, each.name, constant)
    if _fill(checkpoint, layers, backend, progress) or own_layers:
        model.prepared_by = backend.name
    check_scales(model)
    model.eval().finish_loading(backend, opened)
    if left := [name for name, tensor in _tensors(model) if tensor.is_meta]:
        raise CheckpointError(
            f"{type(model).__name__} has {', '.join(left)}, which no checkpoint tensor fills",
            "make it a parameter, or compute it in forward",
        )
    model.loaded = LoadedWeights(tuple(layers), dtype, checkpoint)
    if adapters:
        make_room(model, backend, dtype)
    return model


def build_model(
    checkpoint: Checkpoint,
    model_class: type[CausalLM] | None = None,
    tensor: Group = SOLO,
    source: str = AUTO,
    quantized_weights: QuantizedWeights = AUTO_WEIGHTS,
    cache_dtype: CacheDType = "auto",
    limits: Limits = UNLIMITED,
) -> CausalLM:
    """Return the checkpoint's model on the meta device, without values and with its quantized layers.

    Args:
        checkpoint: the checkpoint.
        model_class: see :func:`hal.load_model`.
        tensor: the ranks that split each layer. The model is then this rank's part.
        source: ``model_source`` of a configuration.
        quantized_weights: the same of it.
        cache_dtype: ``cache.dtype`` of it.
        limits: those of a backend.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit its architecture.
        ConfigError: the model does not support its config.
        ModelError: the model class cannot be imported, or is not a CausalLM.
    """
    model, checkpoint, quantized = _build(checkpoint, model_class, source, quantized_weights, cache_dtype, limits)
    check_fit(checkpoint, model, _stored_bindings(model, quantized, checkpoint))
    if tensor.size > 1:
        shrink(model, Mesh(tensor=tensor))
    return model


def build_for(backend: Backend, checkpoint: Checkpoint, tensor: Group = SOLO) -> CausalLM:
    """Return :func:`build_model`'s model as the backend's configuration asks for it, in the same errors."""
    config = backend.config
    return build_model(
        checkpoint,
        None,
        tensor,
        config.model_source,
        config.quantized_weights,
        config.cache.dtype,
        backend.limits,
    )


def check_shared(checkpoint: Checkpoint, parallel: ParallelConfig, source: str = AUTO) -> None:
    """Raise ConfigError unless ranks can share the checkpoint's model. Needs no ranks, and no values of weights.

    Args:
        checkpoint: the checkpoint.
        parallel: how the ranks share it.
        source: ``model_source`` of the configuration.

    Raises:
        ConfigError: see above; or the model does not support its config.
        CheckpointError: the checkpoint is damaged, or does not fit its architecture.
        ModelError: the model class cannot be imported, or is not a CausalLM.
    """
    model, _, _ = _build(checkpoint, None, source, AUTO_WEIGHTS, "auto")
    mesh = Mesh.planned(parallel.tensor, parallel.data, experts=parallel.experts != "split")
    try:
        if parallel.experts != "split":
            distribute_experts(model, parallel.experts, mesh)
        shrink(model, mesh)
    finally:
        mesh.close()


def _build(
    checkpoint: Checkpoint,
    model_class: type[CausalLM] | None,
    source: str,
    weights: QuantizedWeights,
    cache_dtype: CacheDType,
    limits: Limits = UNLIMITED,
    computing: torch.dtype | None = None,
) -> tuple[CausalLM, Checkpoint, dict[str, QuantizedLayer]]:
    """Return the model without values, the checkpoint with the model's names, and the quantized layers by path."""
    text = checkpoint.config.get("text_config")
    layers = (text if isinstance(text, Mapping) else checkpoint.config).get("num_hidden_layers")
    if type(layers) is int and layers > len(checkpoint.tensors):  # Checked before that many layers are built.
        raise CheckpointError(
            f"config.json in {checkpoint.path} has num_hidden_layers {layers}, and the checkpoint has only "
            f"{len(checkpoint.tensors)} tensors",
            "check that config.json and the weights belong together",
        )
    if model_class is None:
        model_class = find_model_class(checkpoint.architecture, checkpoint.model_config, source)
    model = make_model(check_model_class(model_class, "model_class"), _with_head(checkpoint))
    checkpoint = named_by_model(checkpoint, model)
    quantize_cache(model, cache_dtype, checkpoint)
    if isinstance(checkpoint.files, GgufFiles):
        return model, *pack_layers(model, checkpoint, checkpoint.files, weights, limits, computing or checkpoint.dtype)
    return model, checkpoint, quantize_layers(model, checkpoint, weights, limits)


def _with_head(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the config of a model. The table of embeddings is the head of an embedding model that has none."""
    config = checkpoint.model_config
    if HEAD in checkpoint.tensors or not is_there(checkpoint.path / EMBEDDING_MODULES):
        return config
    if config.get("tie_word_embeddings") is False:
        log.warning("%s embeds texts, and has no %s: texts that it generates mean nothing", checkpoint.path, HEAD)
    return {**config, "tie_word_embeddings": True}


def _log_conversion(quantized: Mapping[str, QuantizedLayer], computing: torch.dtype) -> None:
    """Log what a conversion of quantized weights does to their size."""
    converted = [each for each in quantized.values() if each.converted]
    if converted:
        after = sum(each.module.nbytes(each.module.form, computing) for each in converted)
        before = sum(each.module.nbytes(each.stored_as.form, computing) for each in converted)
        targets = {name for name, form in TARGETS.items() if any(each.module.form == form for each in converted)}
        log.info(
            "the weights of %d quantized layers (%s) become %s: %d MiB in place of %d MiB",
            len(converted),
            ", ".join(sorted({name_of(each.stored_as.form) for each in converted})),
            " and ".join(sorted(targets)),
            after >> 20,
            before >> 20,
        )


def _stored_bindings(
    model: CausalLM, quantized: Mapping[str, QuantizedLayer], checkpoint: Checkpoint, ranks: Group = SOLO
) -> list[Binding]:
    """Return the bindings of all tensors that the checkpoint stores, for ranks that divide each layer."""
    stored = {path: each.stored(path, checkpoint.tensors, ranks) for path, each in quantized.items()}
    return bindings_of(model, stored)


def distribute_experts(model: CausalLM, mode: ExpertsMode, mesh: Mesh) -> None:
    """Make the mixtures of experts of a model without values this rank's whole experts.

    Args:
        model: on the meta device; changed in place.
        mode: the way in which tokens reach the ranks of their experts, any but ``split``.
        mesh: the ranks.

    Raises:
        ConfigError: the model has no experts, or the ranks cannot hold equal numbers of them.
    """
    layers = [(path, each) for path, each in model.named_modules() if isinstance(each, Experts)]
    if not layers:
        raise ConfigError(
            f"parallel.experts is {mode!r}, and {type(model).__name__} has no layers of experts (hal.nn.Experts)",
            'set parallel.experts to "split"',
        )
    for path, layer in layers:
        try:
            layer.distribute(mode, mesh)
        except ConfigError as error:
            raise error.reworded(f"{type(model).__name__}, {path}: {error.problem}", error.remedy) from None


def split_model(model: CausalLM, tensor: Group) -> None:
    """Make a model without values this rank's part of it.

    Args:
        model: on the meta device; changed in place.
        tensor: the ranks that split each layer.

    Raises:
        ConfigError: ranks cannot split the model, or not between this number.
    """
    for path, layer in model.named_modules():
        if layer is model or not callable(split := getattr(layer, "split", None)):
            continue
        try:
            split(tensor)
        except ConfigError as error:
            raise error.reworded(f"{type(model).__name__}, {path}: {error.problem}", error.remedy) from None
    model.split(tensor)


def shrink(model: CausalLM, mesh: Mesh) -> None:
    """Split a model on the meta device, and give its tensors the shapes of this rank's.

    Args:
        model: whole, apart from :func:`distribute_experts`; changed in place.
        mesh: the ranks.

    Raises:
        ConfigError: ranks cannot split the model, or not between this number.
    """
    bindings = bindings_of(model)
    with naming_counts(bindings):
        shapes = [(each, each.rank_shape(mesh)) for each in bindings]
        if mesh.tensor.size > 1:
            split_model(model, mesh.tensor)
    for binding, shape in shapes:
        set_tensor(binding.module, binding.name, torch.empty(shape, dtype=binding.tensor.dtype, device="meta"))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the modules, plain attributes included, which torch does not list."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def _fill(checkpoint: Checkpoint, layers: Sequence[LayerFilling], backend: Backend, progress: Progress | None) -> bool:
    """Read all weights. Return whether the backend changed the format of any."""
    filling = [each for layer in layers for each in layer.fillings]
    large = sum(each.nbytes for each in filling) // LARGE_WEIGHT_FRACTION
    sizes: dict[torch.dtype, list[int]] = {}
    for each in filling:
        if each.prepared:
            sizes.setdefault(each.dtype, []).append(each.shape.numel())
    buffers = WeightBuffers(backend, sizes, min(large, LARGEST_BUFFER_BYTES))

    def allocate(each: Filling) -> Tensor:
        if each.prepared:
            return buffers.take(each.shape, each.dtype)
        return torch.empty(each.shape, dtype=each.dtype, device=backend.device.torch if each.on_device else "cpu")

    ordered = _ordered(layers, large)
    pieces = [(layer, each, piece) for layer in ordered for each in layer.fillings for piece in each.pieces]
    wanted = [piece.slice_of(checkpoint.tensors[piece.source]) for _, _, piece in pieces]
    done, total, changed = 0, sum(_nbytes(each, checkpoint) for each in wanted), False
    for place, start, values in checkpoint.read_slices(wanted):
        layer, each, piece = pieces[place]
        each.put(piece, start, values, allocate)
        if each.complete and layer.complete:
            changed |= layer.load(backend, buffers)
        before, done = done, done + values.nbytes
        if done * CACHE_TRIMS // max(total, 1) > before * CACHE_TRIMS // max(total, 1):
            backend.device.empty_cache()
        if progress is not None:
            progress(done, total)
    return changed


def _ordered(layers: Sequence[LayerFilling], large: int) -> list[LayerFilling]:
    """Order weights so that memory which is needed beside them is needed before most of them are loaded.

    A weight exists twice while a driver prepares it. With the first of each shape, the driver may measure how to.

    Args:
        layers: in the model's order.
        large: in bytes. Larger weights come before others.
    """

    def kind(layer: LayerFilling) -> object:
        return layer.fillings[-1].shape, layer.fillings[-1].dtype

    first = {kind(each): each for each in reversed(layers)}

    def key(layer: LayerFilling) -> tuple[bool, int]:
        nbytes = layer.fillings[-1].nbytes
        return first[kind(layer)] is not layer, -nbytes if nbytes > large else 0

    return sorted(layers, key=key)


def _nbytes(each: TensorSlice, checkpoint: Checkpoint) -> int:
    return each.numel * DTYPES[checkpoint.tensors[each.name].dtype].itemsize
