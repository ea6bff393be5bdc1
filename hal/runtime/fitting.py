"""Whether a checkpoint and a model belong together."""

from __future__ import annotations

from collections.abc import Mapping

from hal.errors import CheckpointError, ModelError, nearest
from hal.nn import CausalLM
from hal.runtime.checkpoint import Checkpoint
from hal.runtime.checkpoint_files import TensorInfo
from hal.runtime.places import Place
from hal.runtime.quantization import QuantizedLayers


def check_fit(checkpoint: Checkpoint, model: CausalLM, places: Mapping[str, Place], quantized: QuantizedLayers) -> None:
    """Raise CheckpointError unless the checkpoint's tensors are those of the model, in shape and kind.

    Raises:
        ModelError: what the model says of tied tensors names none of its own.
    """
    if wrong := [source for source in model.tied.values() if source not in places]:
        raise ModelError(
            f"{type(model).__name__}.tied names {wrong[0]!r} as what is repeated, and the model has no such parameter",
            nearest(wrong[0], places),
        )
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


def check_tied(checkpoint: Checkpoint, model: CausalLM) -> None:
    """Raise CheckpointError if a tensor that is said to repeat another one holds other values, and would be ignored."""
    for name, source in model.tied.items():
        if name in checkpoint.tensors and not checkpoint.equal(name, source):
            raise CheckpointError(
                f"{name} in {checkpoint.path} does not repeat {source}, as config.json says of it",
                "set tie_word_embeddings to false in config.json if it is meant, or remove the tensor",
            )


def _fits(tensor: TensorInfo, place: Place) -> bool:
    return tensor.dtype == "I8" if place.quantized else tensor.is_floating_point
