"""New weights in the spelling of a model in training, as its checkpoint stores them.

A trainer has floating-point weights, and all experts of a layer as one tensor. The checkpoint may have quantized ones,
and a tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import attrs
import torch
from torch import Tensor

from hal.checkpoint.quantized_layers import part_names
from hal.checkpoint.weight_bindings import rounds
from hal.checkpoint.weight_filling import LayerFilling
from hal.errors import CheckpointError
from hal.nn import CausalLM, GroupedLinear
from hal.ops.forms import FLOAT
from hal.quantization.forms import name_of
from hal.quantization.integer_arithmetic import Activation
from hal.quantization.stored_layer import FloatLayer, Writer
from hal.quantization.value_checks import FLOATS


class WeightArrival:
    """Brings tensors of a model in training into the form of its checkpoint.

    Args:
        model: the loaded model.
        layers: what was filled when it was loaded.
        known: the names of the checkpoint's tensors.

    Attributes:
        names: all names of tensors that the model takes.
    """

    def __init__(self, model: CausalLM, layers: Iterable[LayerFilling], known: Collection[str]) -> None:
        self._known = known
        self._quantized: dict[str, tuple[LayerFilling, str]] = {}
        self._tables, self._first = dict[str, str](), dict[str, Tensor]()
        self._fused: dict[str, tuple[str, ...]] = {}
        for layer in layers:
            if layer.quantized is None or layer.quantized.stored_as.form == FLOAT:
                continue
            names, (first, *_) = layer.quantized.names, layer.bindings[0].sources
            for part in names:
                stored = part if len(names) > 1 else first.rpartition(".")[0]
                self._quantized[f"{part}.weight"] = layer, stored
                tied = {name: source for name, source in model.tied.items() if source.rpartition(".")[0] == stored}
                self._tables |= dict.fromkeys((*tied, *tied.values()), f"{part}.weight")
        for path, module in model.named_modules():
            if isinstance(module, GroupedLinear) and module.fused is None:
                self._fused[path] = tuple(f"{part}.weight" for part in part_names(path, module))
        self.names = {*known, *self._quantized, *self._fused}

    def stored(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what the checkpoint has in place of a tensor: often the tensor itself.

        Args:
            name: one of the model's names.
            tensor: the whole tensor.

        Raises:
            CheckpointError: a weight is not finite, or cannot be quantized.
        """
        if name in self._fused and name not in self._known:
            for each, projection in zip(self._fused[name], self._parts(name, tensor), strict=True):
                yield from self.stored(each, projection)
        elif (weight := self._tables.get(name, name)) in self._quantized and rounds(tensor.dtype):
            written, (_, stored) = self._written(weight, tensor), self._quantized[weight]
            if weight in self._tables.values():
                numbers = next(iter(written.values()))
                if (first := self._first.setdefault(weight, numbers)) is not numbers:
                    if not torch.equal(first, numbers):
                        problem = f"{weight} is tied to another tensor, but their values differ"
                        raise CheckpointError(problem, "pass one of them")
                    return
            for part, value in written.items():
                if (full := f"{stored}.{part}") in self._known:  # else it says what others say
                    yield full, value
        else:
            yield name, tensor

    def _parts(self, name: str, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the projections of a tensor of all experts, ``[num_experts, out_features, in_features]``."""
        count = len(self._fused[name])
        parts, left = divmod(count, tensor.shape[0]) if tensor.dim() == 3 and tensor.shape[0] else (0, 1)
        if left or tensor.shape[1] % parts:
            raise CheckpointError(
                f"{name} is {list(tensor.shape)}, and the model has {count} projections of experts in its place",
                "pass [num_experts, out_features, in_features], or the projections by their own names",
            )
        for expert in tensor:
            yield from expert.chunk(parts)

    def _written(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        layer, part = self._quantized[name]
        assert layer.quantized is not None
        form, module = layer.quantized.stored_as.form, layer.quantized.module
        writer: object = layer.quantized.stored_as.reader
        problem = None
        if not isinstance(writer, Writer):
            problem = f"hal does not write the {name_of(form)} of its checkpoint"
        elif form.ordered:
            problem = "its inputs are in groups by activations of the former weights (act-order)"
        elif writer.needs_bias and layer.quantized.biased:
            problem = f"the bias of its {name_of(form)} layer has the scales of the former weights"
        if not isinstance(writer, Writer) or problem is not None:
            remedy = "pass the quantized tensors of its layer, or load a checkpoint of another scheme"
            raise CheckpointError(f"{name} is {tensor.dtype}, and {problem}", remedy)
        if form.zero_points and not layer.quantized.converted and module.weight_zero_point is None:
            form = attrs.evolve(form, zero_points=False)  # The layer has room for none.
        given = {
            each.name: layer.inputs[each.name][tuple(slice(*one) for one in piece.target)].flatten()
            for each, piece in (pair for key in layer.inputs for pair in layer.pieces.get(f"{part}.{key}", ()))
        }
        scale, *offset = (each.item() for each in given.values()) if given else (1.0,)
        scales = {each.name: each.dtype for each in layer.fillings}
        dtype = tensor.dtype if tensor.dtype in FLOATS else torch.float32
        kept = scales.get("scales", dtype)
        floats = FloatLayer(name, tensor.to("cpu", dtype), None, kept, Activation(scale, int(*offset)))
        return {key: value.cpu() for key, value in writer.write(floats, form).items()} | given
