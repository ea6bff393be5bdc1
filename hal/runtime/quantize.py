"""Making an int8 checkpoint of a floating-point one, shard by shard."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hal.backend import active_backend
from hal.errors import CheckpointError, ConfigError, nearest
from hal.nn import CausalLM
from hal.nn.linear import named_parts
from hal.quantization.arithmetic import Activation, activation_for, quantize_weight
from hal.quantization.compressed_tensors import CompressedTensorsWriter
from hal.quantization.description import Scheme, Writer
from hal.quantization.modelslim import ModelSlimWriter
from hal.registry import open_backend
from hal.runtime.calibration import input_ranges
from hal.runtime.checkpoint import Checkpoint
from hal.runtime.checkpoint_files import INDEX
from hal.runtime.fitting import check_tied
from hal.runtime.loading import Progress, build_model, load_model
from hal.runtime.quantization import linear_layers

Format = Literal["compressed-tensors", "modelslim"]
SCHEMES: tuple[Scheme, ...] = ("w8a8", "w8a8_dynamic")
WRITERS: dict[str, Writer] = {"compressed-tensors": CompressedTensorsWriter(), "modelslim": ModelSlimWriter()}
COPIED = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "generation_config.json", "LICENSE*",
)  # fmt: skip
"""The files beside the weights that a checkpoint is used with."""
CALIBRATION_TOKENS = 8192

log = logging.getLogger("hal.runtime")


@attrs.frozen
class Quantized:
    """What :func:`quantize_checkpoint` made.

    Attributes:
        path: the new checkpoint.
        layers: linear layers that are now int8.
        bytes_before: of all weights.
        bytes_after: of all weights.
    """

    path: Path
    layers: int
    bytes_before: int
    bytes_after: int


def quantize_checkpoint(
    source: str | Path | Checkpoint,
    target: str | Path,
    scheme: Scheme,
    *,
    format: Format = "compressed-tensors",  # noqa: A002 - what both formats call it
    calibration: str | None = None,
    calibration_tokens: int | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Write a checkpoint whose linear layers, all but the output projection, are int8.

    Weights get a scale for each output channel, ``max|row| / 127``. For the scheme ``w8a8`` the model reads a text, on
    the CPU and in its own dtype, and each layer's smallest and largest input give its activations' scale; with
    ``w8a8_dynamic`` that is found for each token while the model runs. Weights are read and written file by file.

    Args:
        source: a checkpoint in floating point.
        target: a folder that does not exist yet, or is empty. It appears when everything is written.
        scheme: ``w8a8`` or ``w8a8_dynamic``.
        format: ``compressed-tensors`` or ``modelslim``.
        calibration: the text that ``w8a8`` needs, like those that the model is for.
        calibration_tokens: so many tokens of it are read, from its beginning; None reads 8192.
        progress: told the bytes of weights read so far, and in all.

    Raises:
        ConfigError: the scheme or format is unknown, or there is a text, or a number of its tokens, where none is used,
            or no text where one is.
        CheckpointError: the source cannot be read or is quantised already, or the target cannot be written.
        NumericsError: an activation is not finite.
    """
    _check_request(scheme, format, calibration, calibration_tokens)
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    if checkpoint.quantization is not None:
        raise ConfigError(f"{checkpoint.path} is quantised already", "use a checkpoint in floating point")
    folder = Path(os.path.expanduser(target)).absolute()
    _check_target(folder)
    model = build_model(checkpoint)
    check_tied(checkpoint, model)
    layers = {name: path for path, layer in linear_layers(model) for name, _ in named_parts(path, layer)}
    job = _Job(checkpoint, scheme, format, layers, {})
    if calibration is not None:
        most = CALIBRATION_TOKENS if calibration_tokens is None else calibration_tokens
        job = attrs.evolve(job, activations=_activations(checkpoint, calibration, most, job))
    with _appearing(folder) as partial:
        tensors = _write_weights(job, partial, progress)
        _write_rest(job, model, tensors, partial)
    after = Checkpoint.open(folder)
    sizes = (sum(info.nbytes for info in each.tensors.values()) for each in (checkpoint, after))
    return Quantized(folder, len(layers), *sizes)


@attrs.frozen
class _Job:
    """What is to be written.

    Attributes:
        layers: of the checkpoint, by name, which are to be quantised: the path in the model of what holds them.
        activations: by path in the model, where they are static.
    """

    checkpoint: Checkpoint
    scheme: Scheme
    format: Format
    layers: Mapping[str, str]
    activations: Mapping[str, Activation]


def _check_request(scheme: Scheme, format: Format, calibration: str | None, tokens: int | None) -> None:  # noqa: A002
    if scheme not in SCHEMES:
        raise ConfigError(f"unknown scheme {scheme!r}", nearest(str(scheme), SCHEMES))
    if format not in WRITERS:
        raise ConfigError(f"unknown format {format!r}", nearest(str(format), WRITERS))
    if scheme == "w8a8" and calibration is None:
        raise ConfigError(
            "the scheme w8a8 fixes the scales of activations beforehand, and needs a calibration text for that",
            "give one (--calibration FILE), or use w8a8_dynamic, which needs none",
        )
    if scheme == "w8a8_dynamic" and calibration is not None:
        raise ConfigError("the scheme w8a8_dynamic uses no calibration text", "leave it out, or use w8a8")
    if scheme == "w8a8_dynamic" and tokens is not None:
        raise ConfigError(
            f"the scheme w8a8_dynamic uses no calibration text, and {tokens} tokens of one were asked for",
            "leave them out, or use w8a8",
        )
    if tokens is not None and tokens < 1:
        raise ConfigError(f"{tokens} tokens of calibration were asked for", "ask for at least 1")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` if the block ends well, and is removed if not."""
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
            f"{folder} cannot be written: {error}", "choose a folder that can be, with room"
        ) from None


def _check_target(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already", "choose a folder that does not exist, or remove it first")


def _activations(checkpoint: Checkpoint, text: str, most: int, job: _Job) -> dict[str, Activation]:
    tokens = checkpoint.tokenizer().encode(text).ids
    if len(tokens) > most:
        log.info("the calibration text has %d tokens; the first %d are read", len(tokens), most)
    before = active_backend()
    try:
        with open_backend("cpu") as backend:
            ranges = input_ranges(load_model(checkpoint, backend), backend, tokens[:most])
    finally:
        if before is not None and not before.closed:
            before.activate()
    writer = WRITERS[job.format]
    dtype = writer.activation_dtype(checkpoint.dtype)
    missing = sorted(set(job.layers.values()) - set(ranges))
    if missing:
        raise CheckpointError(
            f"the model computed nothing with {missing[0]} when it read the calibration text", "use w8a8_dynamic"
        )
    return {
        path: activation_for(low, high, symmetric=writer.symmetric, dtype=dtype) for path, (low, high) in ranges.items()
    }


def _write_weights(job: _Job, folder: Path, progress: Progress | None) -> dict[str, bool]:
    """Write the files of weights, and their index. All tensors' names, and whether each is of a quantised layer."""
    checkpoint, writer = job.checkpoint, WRITERS[job.format]
    infos = checkpoint.tensors
    quantised: dict[str, bool] = {}
    weight_map: dict[str, str] = {}
    done, total, size = 0, sum(info.nbytes for info in infos.values()), 0
    for file in sorted({info.file for info in infos.values()}):
        written: dict[str, Tensor] = {}
        for name, values in checkpoint.read([name for name, info in infos.items() if info.file == file]):
            layer, _, suffix = name.rpartition(".")
            done += infos[name].nbytes
            if progress is not None:
                progress(done, total)
            if layer not in job.layers:
                written[name] = values.clone()
                quantised[name] = False
            elif suffix == "weight":
                weight, scale = quantize_weight(name, values)
                activation = job.activations.get(job.layers[layer])
                found = writer.layer(weight, scale, _bias(checkpoint, layer), activation, checkpoint.dtype)
                written |= {f"{layer}.{each}": tensor.contiguous() for each, tensor in found.items()}
                quantised |= {f"{layer}.{each}": True for each in found}
        try:
            save_file(written, str(folder / file.name), metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk; an OSError is what others raise of it
            raise OSError(error) from error
        weight_map |= dict.fromkeys(written, file.name)
        size += sum(tensor.nbytes for tensor in written.values())
    if len(set(weight_map.values())) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    return quantised


def _bias(checkpoint: Checkpoint, layer: str) -> Tensor | None:
    name = f"{layer}.bias"
    return next(iter(checkpoint.read([name])))[1].clone() if name in checkpoint.tensors else None


def _write_rest(job: _Job, model: CausalLM, tensors: Mapping[str, bool], folder: Path) -> None:
    config = dict(job.checkpoint.config)
    for name, value in WRITERS[job.format].describe(config, job.scheme, [model.output_projection], tensors).items():
        _write_json(folder / name, value)
    for pattern in COPIED:
        for file in sorted(job.checkpoint.path.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
