"""New weights in the spelling of a model in training, as its checkpoint stores them.

A trainer has floating-point weights, and all experts of a layer as one tensor. The checkpoint may have quantized ones,
and a tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from hal.checkpoint.quantized_layers import QuantizedLayer, part_names
from hal.checkpoint.weight_bindings import rounds
from hal.checkpoint.weight_filling import LayerFilling
from hal.errors import CheckpointError
from hal.nn import CausalLM, GroupedLinear
from hal.quantization.forms import name_of
from hal.quantization.stored_layer import CalibratedWriter, FloatLayer, Writer
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
        self._quantized: dict[str, QuantizedLayer] = {}
        self._fused: dict[str, tuple[str, ...]] = {}
        for layer in layers:
            if layer.quantized is not None:
                self._quantized |= {f"{part}.weight": layer.quantized for part in layer.quantized.names}
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
        elif name in self._quantized and rounds(tensor.dtype):
            for part, value in self._written(name, tensor).items():
                if (full := f"{name.rpartition('.')[0]}.{part}") in self._known:  # else it says what others say
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
        stored_as = self._quantized[name].stored_as
        writer: object = stored_as.reader
        form = name_of(stored_as.form)
        if not isinstance(writer, Writer):
            raise CheckpointError(
                f"{name} is {tensor.dtype}, and hal does not write the {form} of its checkpoint",
                "pass the quantized tensors of its layer",
            )
        if isinstance(writer, CalibratedWriter):
            raise CheckpointError(
                f"{name} is {tensor.dtype}, and the inputs of its {form} layer have scales of the former weights",
                "pass the quantized tensors of its layer, or use a scheme that scales inputs as the model runs",
            )
        dtype = tensor.dtype if tensor.dtype in FLOATS else torch.float32
        found = writer.write(FloatLayer(name, tensor.to("cpu", dtype), None, dtype), stored_as.form)
        return {part: value.cpu() for part, value in found.items()}
