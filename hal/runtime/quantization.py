"""Quantised layers of a model that is being loaded: put where linear ones stood, then filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor, nn

from hal.backend import Backend
from hal.errors import CheckpointError
from hal.nn import CausalLM, DynamicQuantizedLinear, Linear, MergedLinear, StaticQuantizedLinear
from hal.nn.linear import named_parts
from hal.quantization.arithmetic import DynamicLayer, StaticLayer, merge_dynamic, merge_static
from hal.quantization.description import Quantization, Scheme, TensorSpec
from hal.runtime.checkpoint import Checkpoint
from hal.runtime.checkpoint_files import TensorInfo

ROW_SUMS = "row sums"
CHUNK = 1 << 15
"""Elements that are summed at once."""
_CLASSES: dict[Scheme, type[StaticQuantizedLinear] | type[DynamicQuantizedLinear]] = {
    "w8a8": StaticQuantizedLinear,
    "w8a8_dynamic": DynamicQuantizedLinear,
}


def linear_layers(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """The layers that a quantised checkpoint quantises, unless it says otherwise: all but the output projection."""
    for path, module in model.named_modules():
        ours = type(module) in (Linear, MergedLinear)  # a subclass computes something of its own, and stays
        if isinstance(module, Linear) and ours and path.rpartition(".")[2] != model.output_projection:
            yield path, module


@attrs.frozen(eq=False)
class _Part:
    """A layer of the checkpoint, which is all or a part of one of the model's."""

    name: str
    scheme: Scheme
    specs: Mapping[str, TensorSpec]
    values: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class _Layer:
    module: StaticQuantizedLinear | DynamicQuantizedLinear
    parts: tuple[_Part, ...]


class QuantizedLayers:
    """The quantised layers of a model.

    Making one puts them into the model, without values. :meth:`keep` then takes what lies beside their weights in the
    checkpoint; the weights themselves are the loader's. :meth:`finish` computes from it what the layers need.

    Args:
        model: without values. Its linear layers are replaced.
        checkpoint: says which ones.

    Raises:
        CheckpointError: the checkpoint does not say how a layer is quantised, or quantises the parts of one that hal
            computes as a whole differently.
        ConfigError: it says something that hal does not read.
    """

    def __init__(self, model: CausalLM, checkpoint: Checkpoint) -> None:
        self._layers: list[_Layer] = []
        self._parts: dict[str, _Part] = {}
        self._quantization = quantization = checkpoint.quantization
        if quantization is None:
            return
        layers = list(linear_layers(model))
        # The output projection is in int8 where the checkpoint holds it so, and otherwise not asked about.
        name = model.output_projection
        head, output = checkpoint.tensors.get(f"{name}.weight"), getattr(model, name, None)
        if head is not None and head.dtype == "I8" and isinstance(output, Linear):
            layers.append((name, output))
        for path, linear in layers:
            self._replace(model, path, linear, quantization)

    def _replace(self, model: nn.Module, path: str, linear: Linear, quantization: Quantization) -> None:
        names = named_parts(path, linear)
        schemes = {name: quantization.scheme(name) for name, _ in names}
        if len(set(schemes.values())) > 1:
            found = ", ".join(f"{name} {scheme or 'not'}" for name, scheme in schemes.items())
            raise CheckpointError(
                f"layers that are computed as one are quantised differently: {found}",
                "quantise all of them alike, or none",
            )
        scheme = schemes[names[0][0]]
        if scheme is None:
            return
        out_features, in_features = linear.weight.shape
        with torch.device("meta"):
            module = _CLASSES[scheme](in_features, out_features, getattr(linear, "parts", None))
        model.set_submodule(path, module)
        bias = linear.bias is not None
        parts = tuple(_Part(name, scheme, quantization.tensors(scheme, rows, bias)) for name, rows in names)
        self._layers.append(_Layer(module, parts))
        self._parts |= {part.name: part for part in parts}

    def problems(self, tensors: Mapping[str, TensorInfo]) -> list[str]:
        """What is wrong with the tensors beside the weights."""
        found = []
        for part in self._parts.values():
            for suffix, spec in part.specs.items():
                info = tensors.get(f"{part.name}.{suffix}")
                if info is not None and (problem := spec.problem(info.shape, info.dtype)):
                    found.append(f"{part.name}.{suffix} {problem}")
                elif info is None and spec.required:
                    found.append(f"{part.name}.{suffix} is missing")
        return found

    def names(self) -> set[str]:
        """The tensors beside the weights that the checkpoint may hold."""
        return {f"{part.name}.{suffix}" for part in self._parts.values() for suffix in part.specs}

    def keep(self, name: str, values: Tensor) -> None:
        """Take a tensor, of any name; a weight or one beside it is remembered as far as it is needed."""
        layer, _, suffix = name.rpartition(".")
        part = self._parts.get(layer)
        if part is None:
            return
        if suffix == "weight" and part.scheme == "w8a8":
            part.values[ROW_SUMS] = _row_sums(values)
        elif suffix in part.specs:
            part.values[suffix] = values.clone()  # it is mapped from a file

    def finish(self, backend: Backend, dtype: torch.dtype) -> bool:
        """Give the layers their scales and biases, on the backend's device.

        Args:
            backend: brings scales into the form that its kernels take.
            dtype: what the model computes in.

        Returns:
            Whether the backend changed the form of any.

        Raises:
            CheckpointError: a number is not one that it can be, or parts of one layer do not go together.
        """
        quantization, changed = self._quantization, False
        if quantization is None:
            return changed
        for layer in self._layers:
            named = [(part.name, part.values) for part in layer.parts]
            if isinstance(layer.module, StaticQuantizedLinear):
                static = [quantization.static_layer(name, values, values[ROW_SUMS]) for name, values in named]
                changed |= _finish_static(layer.module, merge_static(static), backend, dtype)
            else:
                dynamic = [quantization.dynamic_layer(name, values) for name, values in named]
                _finish_dynamic(layer.module, merge_dynamic(dynamic), backend.device.torch)
            for part in layer.parts:
                part.values.clear()
        return changed


def _row_sums(weight: Tensor) -> Tensor:
    """int64, a few rows at a time: torch widens what it sums, and large temporaries would leave holes in the heap."""
    rows = max(1, CHUNK // max(1, weight.shape[1]))
    return torch.cat([part.sum(-1, dtype=torch.int64) for part in weight.split(rows)])


def _finish_static(module: StaticQuantizedLinear, layer: StaticLayer, backend: Backend, dtype: torch.dtype) -> bool:
    device, width = backend.device.torch, module.weight.shape[1]
    scale, offset = layer.activation.scale, layer.activation.offset
    module.input_scale = torch.full((width,), scale, dtype=torch.float32, device=device)
    module.input_offset = torch.full((width,), offset, dtype=torch.int32, device=device) if offset else None
    module.quant_bias = layer.quant_bias.to(torch.int32).to(device) if bool(layer.quant_bias.any()) else None
    deq_scale = layer.deq_scale.to(device)
    module.deq_scale = backend.prepare_deq_scale(deq_scale, dtype)
    return module.deq_scale is not deq_scale


def _finish_dynamic(module: DynamicQuantizedLinear, layer: DynamicLayer, device: torch.device) -> None:
    module.weight_scale = layer.weight_scale.to(device)
    module.bias = None if layer.bias is None else layer.bias.to(device)
