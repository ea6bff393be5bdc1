"""Validation of a checkpoint against a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.gguf.gguf_files import GgufFiles
from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.checkpoint.weight_bindings import Binding, Piece, rounds
from hal.checkpoint.weight_filling import LayerFilling
from hal.errors import CheckpointError, ModelError, nearest
from hal.nn import CausalLM, ValueCheck


def check_fit(checkpoint: Checkpoint, model: CausalLM, bindings: Sequence[Binding]) -> None:
    """Raise CheckpointError unless the checkpoint's tensors have the names, shapes and dtypes of the model's.

    Raises:
        ModelError: ``tied`` names a tensor that the model does not have.
    """
    bound = {piece.source: (piece, binding) for binding in bindings for piece in binding.pieces()}
    if wrong := [source for source in model.tied.values() if source not in bound]:
        raise ModelError(
            f"{type(model).__name__}.tied has the source {wrong[0]!r}, which is no parameter of the model",
            nearest(wrong[0], bound),
        )
    tensors = checkpoint.tensors
    problems = [
        f"{name} is missing" for name, (_, each) in bound.items() if name not in tensors and not each.weight.optional
    ]
    problems += dict.fromkeys(
        problem
        for binding in bindings
        for piece in binding.pieces()
        if piece.source in tensors
        for problem in tensor_problems(tensors[piece.source], piece, binding)
    )
    known = {*bound, *model.tied}
    extra = [name for name in tensors if name not in known]
    problems += [f"{name} is not in the model" for name in extra if not model.ignores(name)]
    problems += [
        f"{name} is tied to {source}, but their shapes differ"
        for name, source in model.tied.items()
        if name in tensors and tensors[name].shape != bound[source][0].source_shape
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        problem = f"the tensors in {checkpoint.path} do not fit {checkpoint.architecture}: {shown}"
        if isinstance(checkpoint.files, GgufFiles):
            raise CheckpointError(problem, "give the file of a whole model")
        dtypes = {DTYPES[info.dtype] for info in tensors.values()} - {torch.bool}
        narrow = {str(dtype) for dtype in dtypes if dtype.itemsize == 1}
        undescribed = sorted(narrow)[0].removeprefix("torch.") if narrow and checkpoint.quantization is None else ""
        raise CheckpointError(
            problem,
            "check that config.json and the weights belong together"
            + (f"; no file describes how the {undescribed} weights are quantized" if undescribed else ""),
        )


def check_values(checkpoint: Checkpoint, layers: Iterable[LayerFilling]) -> None:
    """Raise CheckpointError unless the values of scales, zero points and indices obey the rules of their layers."""
    checked = [
        (piece, each.checks) for layer in layers for each in layer.fillings if each.checks for piece in each.pieces
    ]
    wanted, ranges = [piece.slice_of(checkpoint.tensors[piece.source]) for piece, _ in checked], list[Tensor]()
    for place, start, values in checkpoint.read_slices(wanted):
        rows = wanted[place].taken[0][1] - wanted[place].taken[0][0] if wanted[place].taken else 1
        if start or (wanted[place].taken and len(values) < rows):  # A large tensor comes in ranges of rows.
            ranges.append(values.clone())
            if start + len(values) < rows:
                continue
            values, ranges = torch.cat(ranges), []
        for problem, remedy in value_problems(values, checked[place][1]):
            raise CheckpointError(f"{wanted[place].name} {problem}", remedy)


def value_problems(values: Tensor, checks: Iterable[ValueCheck]) -> Iterator[tuple[str, str]]:
    """Yield the problem and the remedy of the first rule that values break: the others may rely on it."""
    values = values.cpu()
    for each in checks:
        if not each.holds(values):
            yield each.problem, each.remedy
            return


def check_tied(checkpoint: Checkpoint, model: CausalLM, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a tied tensor, in the dtype of computation, differs from its source, which is used."""
    for name, source in model.tied.items():
        if name in checkpoint.tensors and not checkpoint.equal(name, source, dtype):
            raise CheckpointError(
                f"{name} in {checkpoint.path} differs from {source}, although config.json ties them",
                "set tie_word_embeddings to false in config.json, or remove the tensor",
            )


def tensor_problems(info: TensorInfo, piece: Piece, binding: Binding) -> Iterator[str]:
    """Yield why a checkpoint's tensor cannot fill a piece of a layer's tensor."""
    column = (*piece.source_shape, 1) if binding.weight.column else None
    if info.shape not in (piece.source_shape, column):
        expected = " or ".join(str(list(each)) for each in (column, piece.source_shape) if each is not None)
        yield f"{piece.source} is {list(info.shape)}, not {expected}"
    held = binding.held
    if stored := binding.weight.stored or (() if rounds(held) else (held,)):
        if DTYPES[info.dtype] not in stored:
            expected = " or ".join(str(each).removeprefix("torch.") for each in stored)
            yield f"{piece.source} is {info.dtype}, expected {expected}"
    elif not info.is_floating_point:
        yield f"{piece.source} is {info.dtype}, expected a floating-point dtype"
