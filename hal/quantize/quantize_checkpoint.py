"""Creation of a quantized checkpoint from a floating-point one, shard by shard."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.loading import Progress, build_model, load_model
from hal.checkpoint.quantized_layers import linear_layers, part_names
from hal.checkpoint.safetensors_files import INDEX
from hal.checkpoint.tensor_names import check_no_fused_experts, named_by_model
from hal.checkpoint.validate import check_tied
from hal.drivers.backend import active_backend
from hal.drivers.registry import open_backend
from hal.errors import CheckpointError, ConfigError, nearest
from hal.nn import CausalLM, Gate
from hal.ops.forms import Form
from hal.progress import Say, going_on, silent, since_start
from hal.quantization.checkpoint_format import FORMATS, CheckpointFormat, Written, formats
from hal.quantization.forms import GROUPED, NAMES, in_groups
from hal.quantization.integer_arithmetic import Activation, row_ranges
from hal.quantization.layer_patterns import ExcludedLayers
from hal.quantization.stored_layer import CalibratedWriter, FloatLayer, Writer
from hal.quantize.calibration import input_ranges

CALIBRATION_TOKENS = 8192
HEAD = "w8a16_group"
"""The scheme of a quantized output projection, with a scale for each row, which compressed-tensors stores."""
TIED = "tie_word_embeddings"
"""The key of config.json that says whether the table of embeddings is the output projection."""
GROUP_SIZE = 128

log = logging.getLogger("hal.quantize")


@attrs.frozen
class Quantized:
    """The result of :func:`quantize_checkpoint`.

    Attributes:
        path: the new checkpoint.
        layers: number of quantized linear layers.
        bytes_before: size of all weights before.
        bytes_after: size of all weights after.
        errors: of each quantized layer, by its name in the checkpoint: the root mean square of the difference of its
            weight, relative to that of the weight.
    """

    path: Path
    layers: int
    bytes_before: int
    bytes_after: int
    errors: Mapping[str, float]


def quantize_checkpoint(
    source: str | Path | Checkpoint,
    target: str | Path,
    scheme: str,
    *,
    format: str = "compressed-tensors",
    calibration: str | None = None,
    calibration_tokens: int | None = None,
    group_size: int | None = None,
    keep: Sequence[str] = (),
    head: bool = False,
    progress: Progress | None = None,
    say: Say = silent,
) -> Quantized:
    """Write a checkpoint in which all linear layers except the output projection and the encoder's are quantized.

    With ``head``, the output projection becomes int8 with a scale for each row, whatever the scheme. If it is the table
    of embeddings, the new checkpoint has it beside the table, and no longer ties them.

    In ``w4a16``, ``w4a8_dynamic`` and ``w8a16_group``, each group of inputs has a scale, without zero points; of some
    scales, that of the least error. In ``fp8`` and hal's other schemes, weights have one scale per output channel.
    ``w8a8`` runs the model on a calibration text, on the CPU and in the model's dtype; each layer's smallest and
    largest input set the scale of its activations. ``w8a8_dynamic`` and ``w4a8_dynamic`` compute that scale per token
    at run time. The others quantize only the weights.
    Weights are read and written file by file.

    Args:
        source: a floating-point checkpoint.
        target: a folder that does not exist or is empty. It is created only once everything is written.
        scheme: ``w4a16``, ``w4a8_dynamic``, ``w8a16_group``, ``fp8``, ``w8a16``, ``w8a8``, or ``w8a8_dynamic``.
        format: ``compressed-tensors``, ``modelslim``, or another package's registered format that stores the scheme.
        calibration: text that is representative of the model's use; required by ``w8a8``.
        calibration_tokens: number of its tokens to read, from the beginning; None reads 8192.
        group_size: the inputs of a group, for schemes with groups; -1 for one group per row, None for 128.
        keep: layers to leave unquantized: names in the checkpoint, or consecutive parts of names, such as
            ``layers.0.mlp``.
        head: whether the output projection is quantized.
        progress: called with the bytes of weights read so far and in total.
        say: called with progress messages, also from another thread.

    Raises:
        ConfigError: the scheme or format is unknown; the format does not store the quantized output projection, or the
            model has none; the scheme requires a calibration text, and none is given; or a
            text, a number of tokens or a group size is given to a scheme that uses none; or no layer has a name of
            ``keep``, or a layer cannot be quantized in these groups.
        CheckpointError: the source cannot be read or is already quantized, or the target cannot be written.
        NumericsError: an activation is not finite.
    """
    written, writer = _check_request(scheme, format, calibration, calibration_tokens)
    form = _in_groups(scheme, group_size)
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    if checkpoint.quantization is not None:
        raise ConfigError(f"{checkpoint.path} is already quantized", "use a floating-point checkpoint")
    folder = Path(os.path.expanduser(target)).absolute()
    _check_target(folder)
    model = build_model(checkpoint)
    check_no_fused_experts(model, checkpoint.path)
    checkpoint = named_by_model(checkpoint, model)
    check_tied(checkpoint, model, checkpoint.dtype)
    layers, kept = _chosen_layers(model, keep, form)
    say = since_start(say)
    sources = {f"{name}.weight": name for name in layers}
    alone = _Job(checkpoint, Written(scheme, form), written, writer, layers, sources, {}, kept, {})
    job = _with_head(alone, model) if head else alone
    if isinstance(writer, CalibratedWriter) and calibration is not None:
        most = CALIBRATION_TOKENS if calibration_tokens is None else calibration_tokens
        job = attrs.evolve(job, activations=_activations(checkpoint, calibration, most, writer, layers.values(), say))
    with _atomic_folder(folder) as partial:
        with going_on(say, f"writing {len(job.layers)} quantized layers and the other weights") as done:
            tensors = _write_weights(job, partial, [done] if progress is None else [done, progress])
        _write_rest(job, model, tensors, partial)
    after = Checkpoint.open(folder)
    before, now = (sum(info.nbytes for info in each.tensors.values()) for each in (checkpoint, after))
    return Quantized(folder, len(job.layers), before, now, job.errors)


@attrs.frozen
class _Job:
    """The checkpoint to write.

    Attributes:
        layers: layers to quantize, by name in the checkpoint; the values are paths in the model.
        sources: the layers to quantize, by the name of the tensor with the weight.
        activations: static scales of activations, by path in the model.
        kept: linear layers that the user keeps.
        errors: those of the layers that have been written.
    """

    checkpoint: Checkpoint
    written: Written
    format: CheckpointFormat
    writer: Writer
    layers: Mapping[str, str]
    sources: Mapping[str, str]
    activations: Mapping[str, Activation]
    kept: Sequence[str]
    errors: dict[str, float]


def _with_head(job: _Job, model: CausalLM) -> _Job:
    """Return the job with the output projection, which other layers do not limit."""
    name = model.output_projection
    if HEAD not in job.format.writers:
        raise ConfigError(
            f"the format {job.format.name} does not store an output projection in {HEAD}",
            "use --format compressed-tensors, or omit --head",
        )
    source = model.tied.get(f"{name}.weight", f"{name}.weight")
    if source not in job.checkpoint.tensors:
        raise ConfigError(f"{type(model).__name__} has no output projection {name}", "omit --head")
    return attrs.evolve(
        job,
        layers={**job.layers, name: name},
        sources={**job.sources, source: name},
        written=attrs.evolve(job.written, others={name: (HEAD, NAMES[HEAD][0])}),
    )


def _in_groups(scheme: str, group_size: int | None) -> Form:
    """Return the form of a name, with groups of a size if it has groups."""
    form, _ = NAMES[scheme]
    if scheme not in GROUPED:
        if group_size is not None:
            raise ConfigError(f"the scheme {scheme} has no groups, but group_size is {group_size}", "omit --group-size")
        return form
    size = GROUP_SIZE if group_size is None else group_size
    if size != -1 and size < 1:
        raise ConfigError(f"group_size is {size}", "use a positive number of inputs, or -1 for a whole row")
    return in_groups(form, {"group_size": size})


def _chosen_layers(model: CausalLM, keep: Sequence[str], form: Form) -> tuple[dict[str, str], list[str]]:
    """Return the layers to quantize, with their paths in the model, and those that ``keep`` names."""
    excluded, size = ExcludedLayers(None, {"--keep": list(keep)}), form.columns
    layers, kept = dict[str, str](), list[str]()
    beside = set(_encoder_layers(model))
    for path, layer in linear_layers(model):
        if path in beside:
            continue
        names = part_names(path, layer)
        left = [name for name in names if excluded.excludes(name)]
        if left and len(left) < len(names):
            other = next(each for each in names if each not in left)
            raise ConfigError(
                f"{left[0]} is kept, but {other} is not, and hal merges them", "keep all of them, or none"
            )
        if not left and size and layer.in_features % size:
            raise ConfigError(
                f"{names[0]} has {layer.in_features} inputs, which is no multiple of the group_size {size}",
                f"use a divisor of {layer.in_features}, or -1 for one group per row; or keep the layer with --keep",
            )
        kept += left
        layers |= {} if left else dict.fromkeys(names, path)
    for each in keep:
        alone = ExcludedLayers(None, {"--keep": [each]})
        if not any(map(alone.excludes, kept)):
            raise ConfigError(f"no layer that would be quantized has the name {each!r}", nearest(each, layers))
    return layers, kept


def _encoder_layers(model: CausalLM) -> list[str]:
    """Return the paths of the linear layers of the model's encoder, which stay as they are: texts do not run them."""
    inside = set() if model.encoder is None else set(model.encoder.modules())
    return [path for path, layer in linear_layers(model) if layer in inside]


def _check_request(
    scheme: str, format: str, calibration: str | None, tokens: int | None
) -> tuple[CheckpointFormat, Writer]:
    writable = {name for each in formats().values() for name in each.writers}
    if scheme not in writable:
        raise ConfigError(f"unknown scheme {scheme!r}", nearest(str(scheme), sorted(writable)))
    if format not in FORMATS.names():
        raise ConfigError(f"unknown format {format!r}", nearest(format, FORMATS.names()))
    written = formats()[format]
    if scheme not in written.writers:
        able = " or ".join(name for name, each in formats().items() if scheme in each.writers)
        raise ConfigError(f"the scheme {scheme} cannot be written in the format {format}", f"use {able}")
    chosen = written.writers[scheme]
    calibrates, every = isinstance(chosen, CalibratedWriter), [each.writers for each in formats().values()]
    others = " or ".join(
        name
        for name in NAMES
        if any(isinstance(each[name], CalibratedWriter) != calibrates for each in every if name in each)
    )
    if calibrates and calibration is None:
        raise ConfigError(
            f"the scheme {scheme} requires a calibration text", f"use --calibration FILE, or {others}, which needs none"
        )
    if not calibrates and calibration is not None:
        raise ConfigError(f"the scheme {scheme} uses no calibration text", f"omit it, or use {others}")
    if not calibrates and tokens is not None:
        raise ConfigError(
            f"the scheme {scheme} uses no calibration text, but calibration_tokens is {tokens}",
            f"omit --calibration-tokens, or use {others}",
        )
    if tokens is not None and tokens < 1:
        raise ConfigError(f"the number of calibration tokens is {tokens}", "use at least 1")
    return written, chosen


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to ``folder`` if the block succeeds, else remove it."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error}", "choose a writable folder with enough space"
        ) from None


def _check_target(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already", "choose another folder, or remove it first")


def _activations(
    checkpoint: Checkpoint, text: str, most: int, writer: CalibratedWriter, layers: Iterable[str], say: Say
) -> dict[str, Activation]:
    tokens = checkpoint.tokenizer().encode(text).ids
    if len(tokens) > most:
        log.info("the calibration text has %d tokens; the first %d are read", len(tokens), most)
    before = active_backend()
    try:
        with open_backend("cpu") as backend:
            with going_on(say, "loading the model to calibrate it") as done:
                model = load_model(checkpoint, backend, progress=done)
            with going_on(say, f"calibrating on {min(len(tokens), most)} tokens") as done:
                ranges = input_ranges(model, backend, tokens[:most], progress=done)
    finally:
        if before is not None and not before.closed:
            before.activate()
    missing = sorted(set(layers) - set(ranges))
    if missing:
        raise CheckpointError(f"the model does not run {missing[0]} on the calibration text", "use w8a8_dynamic")
    dtype = checkpoint.dtype
    return {path: writer.activation(low, high, dtype) for path, (low, high) in ranges.items()}


def _write_weights(job: _Job, folder: Path, progress: Sequence[Progress]) -> dict[str, bool]:
    """Write the weight files and index; return, by tensor name, whether it belongs to a quantized layer."""
    checkpoint = job.checkpoint
    infos = checkpoint.tensors
    quantized: dict[str, bool] = {}
    weight_map: dict[str, str] = {}
    done, total, size = 0, sum(info.nbytes for info in infos.values()), 0
    for file in sorted({info.file for info in infos.values()}):
        written: dict[str, Tensor] = {}
        for name, values in checkpoint.read([name for name, info in infos.items() if info.file == file]):
            done += infos[name].nbytes
            for each in progress:
                each(done, total)
            if name.rpartition(".")[0] not in job.layers:
                written[name] = values.clone()
                quantized[name] = False
            if (layer := job.sources.get(name)) is not None:
                activation, bias = job.activations.get(job.layers[layer]), _bias(checkpoint, layer)
                scheme, form = job.written.others.get(layer, (job.written.scheme, job.written.form))
                writer = job.format.writers[scheme]
                found = writer.write(FloatLayer(name, values, bias, checkpoint.dtype, activation), form)
                job.errors[layer] = _error(writer, found, form, values)
                written |= {f"{layer}.{each}": tensor.contiguous() for each, tensor in found.items()}
                quantized |= {f"{layer}.{each}": True for each in found}
        try:
            shard = file.with_suffix(".safetensors").name
            save_file(written, str(folder / shard), metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk, for which other writers raise OSError
            raise OSError(error) from error
        weight_map |= dict.fromkeys(written, shard)
        size += sum(tensor.nbytes for tensor in written.values())
    if len(set(weight_map.values())) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return quantized


def _error(writer: Writer, tensors: Mapping[str, Tensor], form: Form, wanted: Tensor) -> float:
    difference = size = 0.0
    for rows in row_ranges(wanted):
        wide = wanted[rows].float()
        found = writer.written(tensors, form, rows)
        difference += float((found - wide).square().sum())
        size += float(wide.square().sum())
    return math.sqrt(difference / max(size, 1e-60))


def _bias(checkpoint: Checkpoint, layer: str) -> Tensor | None:
    name = f"{layer}.bias"
    return next(iter(checkpoint.read([name])))[1].clone() if name in checkpoint.tensors else None


def _write_rest(job: _Job, model: CausalLM, tensors: Mapping[str, bool], folder: Path) -> None:
    others = job.written.others
    config = _untied(job.checkpoint.config) if others else dict(job.checkpoint.config)
    gates = (path for path, layer in model.named_modules() if isinstance(layer, Gate))
    kept = [*({model.output_projection} - others.keys()), *job.kept, *gates, *_encoder_layers(model)]
    for name, value in job.format.describe(config, job.written, kept, tensors).items():
        _write_json(folder / name, value)
    job.checkpoint.files.write_beside(folder)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a model whose output projection is a tensor beside the table of embeddings."""
    text = config.get("text_config")
    inner = {"text_config": {**text, TIED: False}} if isinstance(text, Mapping) else {}
    return {**config, **inner, TIED: False}


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
