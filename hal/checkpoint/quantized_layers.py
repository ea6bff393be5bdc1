"""Quantized layers of a model during loading: they replace linear layers, and their schemes finish them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.quantized_parts import Computed, QuantizedLayer, QuantizedPart
from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.checkpoint.weight_bindings import Binding
from hal.device.group import SOLO, Group
from hal.drivers.backend import Backend
from hal.errors import CheckpointError, ConfigError, ModelError
from hal.nn import CausalLM, GroupedLinear, Linear, MergedLinear, Share, Weight
from hal.nn.experts import EXPERTS
from hal.nn.linear import OUT
from hal.nn.weights.share import EQUALLY
from hal.quantization.description import Quantization


def linear_layers(model: CausalLM) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """Yield the layers that a checkpoint quantizes by default: all linear ones except the output projection."""
    for path, module in model.named_modules():
        ours = type(module) in (Linear, MergedLinear, GroupedLinear)  # A subclass computes something else, and stays.
        if isinstance(module, Linear | GroupedLinear) and ours and path.rpartition(".")[2] != model.output_projection:
            yield path, module


def named_parts(path: str, layer: Linear | GroupedLinear) -> list[tuple[str, int]]:
    """Return the names and rows of the checkpoint's layers that make up ``layer``, at ``path`` in the model."""
    pieces = Binding(path, layer, "weight", layer.weights["weight"], layer.weight).pieces()
    return [(piece.source.rpartition(".")[0], piece.source_shape[0]) for piece in pieces]


class QuantizedLayers:
    """The quantized layers of a model.

    The constructor puts them into the model, without values. The loader fills the weights. :meth:`keep` receives the
    other tensors of the layers, and :meth:`observe` the rows of the weights. From these, :meth:`finish` lets the
    schemes compute the remaining tensors.

    Args:
        model: without values. Its quantized linear layers are replaced.
        checkpoint: describes which layers are quantized.

    Raises:
        CheckpointError: the checkpoint does not say how a layer is quantized, or quantizes the parts of a merged layer
            differently.
        ConfigError: hal does not support its quantization.
    """

    def __init__(self, model: CausalLM, checkpoint: Checkpoint) -> None:
        self._layers: list[QuantizedLayer] = []
        self._parts: dict[str, QuantizedPart] = {}
        self._format = ""
        self._tensor = SOLO
        self._tensors = checkpoint.tensors
        quantization = checkpoint.quantization
        if quantization is None:
            return
        self._format = quantization.format
        layers = list(linear_layers(model))
        # The output projection is quantized only if the checkpoint holds it in int8.
        name = model.output_projection
        head, output = checkpoint.tensors.get(f"{name}.weight"), getattr(model, name, None)
        if head is not None and not head.is_floating_point and isinstance(output, Linear):
            layers.append((name, output))
        for path, linear in layers:
            self._replace(model, path, linear, quantization)

    def _replace(self, model: nn.Module, path: str, linear: Linear | GroupedLinear, quantization: Quantization) -> None:
        if getattr(linear, "fused", None) is not None and self._tensors[path].is_floating_point:
            return  # The description names layers, and fused experts are none.
        names = named_parts(path, linear)
        schemes = {name: quantization.scheme(self._stored(name)) for name, _ in names}
        if len({each and each.name for each in schemes.values()}) > 1:
            found = ", ".join(f"{name} {scheme.name if scheme else 'not'}" for name, scheme in schemes.items())
            raise CheckpointError(
                f"layers that are merged into one are quantized differently: {found}",
                "quantize all of them in the same way, or none",
            )
        scheme = schemes[names[0][0]]
        if scheme is None:
            return
        with torch.device("meta"):
            if isinstance(linear, GroupedLinear):
                module, bias = scheme.grouped_layer(linear), False
            else:
                module, bias = scheme.layer(linear), linear.bias is not None
        model.set_submodule(path, module)
        parts = tuple(
            QuantizedPart(name, module, rows, scheme, scheme.tensors(self._format, rows, bias)) for name, rows in names
        )
        self._layers.append(QuantizedLayer(module, scheme, parts))
        self._parts |= {part.name: part for part in parts}

    def _stored(self, layer: str) -> str:
        """Return the checkpoint's own name of a layer."""
        info = self._tensors.get(f"{layer}.weight")
        return info.stored.rpartition(".")[0] if info is not None and info.stored else layer

    def problems(self, tensors: Mapping[str, TensorInfo], layers: Collection[nn.Module] | None = None) -> list[str]:
        """Return the problems of the tensors other than the weights, of some of the model's layers or of all."""
        found = []
        for part in self._parts.values():
            if layers is not None and part.layer not in layers:
                continue
            for suffix, spec in part.specs.items():
                info = tensors.get(f"{part.name}.{suffix}")
                if info is not None and (problem := spec.problem(info.shape, info.dtype)):
                    found.append(f"{part.name}.{suffix} {problem}")
                elif info is None and spec.required:
                    found.append(f"{part.name}.{suffix} is missing")
        return found

    def names(self) -> set[str]:
        """Return the names of the tensors other than the weights that the checkpoint may hold."""
        return {f"{part.name}.{suffix}" for part in self._parts.values() for suffix in part.specs}

    @property
    def modules(self) -> set[nn.Module]:
        """The model's quantized layers."""
        return {layer.module for layer in self._layers}

    def layer_of(self, name: str) -> nn.Module | None:
        """Return the model's layer that a tensor other than a weight belongs to, or None."""
        part = self._parts.get(name.rpartition(".")[0])
        return None if part is None or name.rpartition(".")[2] not in part.specs else part.layer

    def split(self, tensor: Group) -> None:
        """Keep only what this rank's part of each layer needs.

        Args:
            tensor: the ranks that split each layer.

        Raises:
            ConfigError: a scheme's layer cannot be split, while the layer that it replaces would be.
        """
        for layer in self._layers:
            if not hasattr(layer.module, "split"):
                raise ConfigError(
                    f"{tensor.size} ranks cannot split {type(layer.module).__name__}, the layer of the quantization "
                    f"scheme {layer.scheme.name} for {layer.parts[0].name}",
                    "set parallel.tensor to 1, or derive the layer from hal.nn.QuantizedLinear, and call its join",
                )
        self._tensor = tensor

    def distribute(self, expert: Group) -> None:
        """Keep only this rank's experts of layers whose experts are whole. Called after the checks of the checkpoint.

        Of the other ranks' experts, it keeps the numbers for all rows, on which all experts of a layer agree.

        Args:
            expert: the ranks that share the experts.

        Raises:
            ConfigError: a scheme's layer does not declare its weight to be shared by experts.
        """
        for index, layer in enumerate(self._layers):
            if getattr(layer.module, "shard", None) != EXPERTS:
                continue
            weight = getattr(layer.module, "weights", {}).get("weight")
            if weight is None or weight.group != "expert":
                raise ConfigError(
                    f"ranks cannot share the experts of {type(layer.module).__name__}, the layer of the quantization "
                    f"scheme {layer.scheme.name} for {layer.parts[0].name}",
                    'set parallel.experts to "split", or derive the layer from hal.nn.QuantizedGroupedLinear',
                )
            start, stop = weight.share.interval(len(layer.parts), expert.rank, expert.size)
            others = *layer.parts[:start], *layer.parts[stop:]
            for part in others:
                del self._parts[part.name]
            # What all experts agree on, such as the scale of their input, must be the same on every rank.
            agreeing = [self._without_rows(part) for part in others if any(spec.whole for spec in part.specs.values())]
            self._parts |= {part.name: part for part in agreeing}
            self._layers[index] = attrs.evolve(layer, parts=(*layer.parts[start:stop], *agreeing))

    def _without_rows(self, part: QuantizedPart) -> QuantizedPart:
        """Return another rank's expert as a part without rows. Only its numbers for all rows are read."""
        weight: Any = part.layer.weight
        statistics = part.scheme.row_statistics(torch.empty(0, weight.shape[-1], dtype=weight.dtype))
        rows = {
            suffix: info
            for suffix, spec in part.specs.items()
            if not spec.whole
            if (info := self._tensors.get(f"{part.name}.{suffix}")) is not None
        }
        return attrs.evolve(
            part,
            rows=0,
            specs={suffix: spec for suffix, spec in part.specs.items() if spec.whole},
            first_values={
                suffix: torch.empty(0, *info.shape[1:], dtype=DTYPES[info.dtype]) for suffix, info in rows.items()
            },
            first_statistics=() if statistics is None else (statistics,),
        )

    def keep(self, name: str, values: Tensor) -> None:
        """Receive one of the tensors of :meth:`names`, whole."""
        layer, _, suffix = name.rpartition(".")
        part = self._parts[layer]
        kept = _of_rank(part, suffix, values, self._tensor)
        part.values[suffix] = kept.clone()  # The values are mapped from a file.

    def observe(self, name: str, rows: Tensor) -> None:
        """Receive rows of any tensor, in order. Only those of quantized weights are used."""
        layer, _, suffix = name.rpartition(".")
        if suffix == "weight" and (part := self._parts.get(layer)) is not None:
            statistics = part.scheme.row_statistics(rows)
            if statistics is not None:
                part.statistics.append(statistics)

    def finish(self, backend: Backend, dtype: torch.dtype) -> bool:
        """Set the tensors that the schemes compute, on the backend's device.

        Args:
            backend: converts them to the format of its kernels.
            dtype: the dtype of computation.

        Returns:
            Whether the backend changed the format of any.

        Raises:
            CheckpointError: a number is out of range, or the parts of a layer are inconsistent.
        """
        changed = False
        for computed in self.computed():
            changed |= computed.set(backend, dtype)
        return changed

    def forget(self) -> None:
        """Forget what has been read."""
        for part in self._parts.values():
            part.forget()

    def computed(self, layers: Collection[nn.Module] | None = None) -> Iterator[Computed]:
        """Compute what the schemes compute from what was read, and forget that; for some of the model's layers or all.

        Raises:
            CheckpointError: a number is out of range, or the parts of a layer are inconsistent.
        """
        for layer in self._layers:
            if layers is not None and layer.module not in layers:
                continue
            declared: Mapping[str, Weight] = getattr(layer.module, "weights", {})
            parts = [
                layer.scheme.part(
                    self._format, part.name, part.values, torch.cat(part.statistics) if part.statistics else None
                )
                for part in layer.parts
            ]
            for name, value in layer.scheme.finish(layer.module, parts).items():
                if name not in declared:
                    raise ModelError(
                        f"the scheme {layer.scheme.name} computes {name}, which {type(layer.module).__name__} does not "
                        "declare",
                        "add it to the layer's weights, without sources",
                    )
                yield Computed(layer.module, layer.parts[0].name, name, value, declared[name])
            for part in layer.parts:
                part.forget()


def _of_rank(part: QuantizedPart, name: str, values: Tensor, tensor: Group) -> Tensor:
    """Return what one of the ranks that split a layer keeps of a tensor beside its weight."""
    shard = getattr(part.layer, "shard", None)
    if tensor.size == 1 or shard in (None, EXPERTS) or values.shape[:1] != (part.rows,):
        return values
    if shard == OUT:
        share: Share = getattr(part.layer, "share", EQUALLY)
        start, stop = share.interval(part.rows, tensor.rank, tensor.size)
        return values[start:stop]
    # Ranks that split the input add their results, so that one of them adds the bias.
    return torch.zeros_like(values) if tensor.rank > 0 and name in ADDED else values


ADDED = frozenset({"bias", "quant_bias"})
"""Tensors beside a weight that are added to its product."""
