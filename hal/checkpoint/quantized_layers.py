"""Quantized layers of a model during loading: they replace linear layers, and their schemes finish them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.converted_weights import AUTO, DEQUANTIZED, KEPT, Conversion
from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.config.settings import QuantizedWeights
from hal.device.limits import UNLIMITED, Limits
from hal.errors import CheckpointError, ConfigError, ModelError
from hal.nn import CausalLM, GroupedLinear, Linear, MergedLinear, QuantizedLinear, Weight
from hal.nn.linear import EXPERTS
from hal.nn.weights.share import EQUALLY
from hal.nn.weights.weight import source_name
from hal.parallel.mesh import Mesh
from hal.quantization.checkpoint_format import CheckpointFormat, Quantization
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.scheme import Scheme


def linear_layers(model: CausalLM) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """Yield the layers that a checkpoint quantizes by default: all linear ones except the output projection."""
    for path, module in model.named_modules():
        ours = type(module) in (Linear, MergedLinear, GroupedLinear)  # A subclass computes something else, and stays.
        if isinstance(module, Linear | GroupedLinear) and ours and path.rpartition(".")[2] != model.output_projection:
            yield path, module


def part_names(path: str, layer: Linear | GroupedLinear) -> tuple[str, ...]:
    """Return the names of the checkpoint's layers that make up ``layer``, at ``path`` in the model."""
    return tuple(source_name(path, each).rpartition(".")[0] for each in layer.weights["weight"].sources)


@attrs.frozen(eq=False)
class QuantizedLayer:
    """A layer of a model that a scheme has replaced.

    Attributes:
        module: the layer that the model runs.
        names: the names of its parts in the checkpoint.
        scheme: the checkpoint's scheme.
        representation: how the checkpoint stores it.
        described: the layer that the scheme made: the same, unless weights are converted.
        conversion: the conversion of the weights, or None.
    """

    module: Any
    names: tuple[str, ...]
    scheme: Scheme
    representation: Representation
    described: Any
    conversion: Conversion | None = None

    @property
    def declared(self) -> Mapping[str, Weight]:
        """The declarations of the layer's own tensors."""
        found: Mapping[str, Weight] = getattr(self.module, "weights", {})
        return found

    def _shared(self) -> Any:
        """Return the layer that the scheme made, shared by ranks as the model's is."""
        if self.described is not self.module:
            for name in ("shard", "sizes"):
                setattr(self.described, name, getattr(self.module, name))
        return self.described

    def stored(self, path: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Weight]:
        """Return the declarations of the tensors to read, with the dtypes that they have in the checkpoint.

        Args:
            path: the layer's path in the model.
            tensors: the checkpoint's tensors.
        """
        described = self._shared()
        held = {name for name, buffer in described.named_buffers(recurse=False)}
        declared: Mapping[str, Weight] = getattr(described, "weights", {})
        own = {name: each for name, each in declared.items() if each.sources and name in held}
        found = {}
        for name, weight in {**own, **self.representation.declare(described)}.items():
            infos = [tensors[full] for each in weight.sources if (full := source_name(path, each)) in tensors]
            if weight.optional and not infos:
                continue
            if weight.dtype is None and weight.stored:
                dtypes = [DTYPES[info.dtype] for info in infos if DTYPES[info.dtype] in weight.stored]
                kept = (dtypes or weight.stored)[0]
                weight = attrs.evolve(weight, dtype=kept, stored=(kept,) if dtypes else weight.stored)
            found[name] = weight
        return found

    def finish(self, tensors: Tensors, mesh: Mesh) -> Tensors:
        """Return the layer's own tensors from those that were read.

        Args:
            tensors: this rank's tensors.
            mesh: the ranks.

        Raises:
            CheckpointError: a number is out of range, or the parts of the layer are inconsistent.
        """
        described = self._shared()
        declared = {**getattr(described, "weights", {}), **self.representation.declare(described)}
        absent = dict.fromkeys(name for name, each in declared.items() if each.sources)
        first = 0
        if getattr(self.module, "shard", None) == EXPERTS:
            first, _ = EQUALLY.interval(self.module.num_experts, mesh.expert.rank, mesh.expert.size)
        stored = StoredLayer(described, self.names, {**absent, **tensors}, first)
        decoded = attrs.evolve(stored, tensors=self.representation.decode(stored))
        finished = self.scheme.finish(decoded)
        if self.conversion is not None:
            weight = finished["weight"]
            assert weight is not None
            num_experts = None if described.num_experts is None else weight.shape[0]
            finished = self.conversion.tensors(finished, self.names[0], described.in_features, num_experts)
        if unknown := sorted(finished.keys() - self.declared.keys()):
            raise ModelError(
                f"the scheme {self.scheme.name} computes {unknown[0]}, which {type(self.module).__name__} does not "
                "declare",
                "add it to the layer's weights",
            )
        return finished


def quantize_layers(
    model: CausalLM, checkpoint: Checkpoint, weights: QuantizedWeights = AUTO, limits: Limits = UNLIMITED
) -> dict[str, QuantizedLayer]:
    """Replace the layers of a model that the checkpoint quantizes, and return the replacements by path.

    Args:
        model: without values.
        checkpoint: describes which layers are quantized.
        weights: what becomes of their weights; ``quantized_weights`` of a configuration.
        limits: those of a backend, with the schemes that ``auto`` converts.

    Raises:
        CheckpointError: the checkpoint does not say how a layer is quantized, or quantizes the parts of a merged layer
            differently.
        ConfigError: hal does not support its quantization, or the conversion.
    """
    described = checkpoint.quantization
    if described is None:
        if weights != AUTO:
            raise ConfigError(
                f"quantized_weights is {weights!r}, and {checkpoint.path} has no quantized weights",
                "set quantized_weights to auto",
            )
        return {}
    tensors, layers = checkpoint.tensors, list(linear_layers(model))
    held: dict[str, dict[str, TensorInfo]] = {}
    for full, info in tensors.items():
        layer, _, part = full.rpartition(".")
        held.setdefault(layer, {})[part] = info
    name, output = model.output_projection, getattr(model, model.output_projection, None)
    if isinstance(output, Linear) and name in held:
        layers.append((name, output))
    found = {}
    for path, linear in layers:
        whole = tensors.get(path) if getattr(linear, "fused", None) is not None else None
        # The description names layers, and fused experts are none.
        fused = whole is not None and whole.is_floating_point
        replaced = None if fused else _quantized(path, linear, *described, held, weights, limits.requantized)
        if replaced is not None:
            model.set_submodule(path, replaced.module)
            found[path] = replaced
    return found


def _scheme(name: str, quantization: Quantization, held: Mapping[str, TensorInfo]) -> Scheme | None:
    """Return the scheme of a checkpoint layer. Its tensors say whether it is quantized, and the description how.

    Args:
        name: the layer.
        quantization: the description, which has the checkpoint's own names.
        held: the tensors of the layer, by the last part of their names.

    Raises:
        CheckpointError: the description says that it is not quantized, and its tensors are.
    """
    stored = next((each.stored.rpartition(".")[0] for each in held.values() if each.stored), name)
    weight = held.get("weight")
    floating = weight is not None and weight.is_floating_point
    if floating and held.keys() <= {"weight", "bias"} and not quantization.states_dtype(stored):
        return None
    scheme = quantization.scheme(stored)
    if scheme is None and not floating and (others := held.keys() - {"bias"}):
        raise CheckpointError(
            f"{quantization.exclusion(stored)} excludes {stored}, which has quantized {', '.join(sorted(others))[:80]}",
            "correct the description, or download the checkpoint again",
        )
    return scheme


def _quantized(
    path: str,
    linear: Linear | GroupedLinear,
    format: CheckpointFormat,
    quantization: Quantization,
    held: Mapping[str, Mapping[str, TensorInfo]],
    weights: QuantizedWeights,
    requantized: Collection[str],
) -> QuantizedLayer | None:
    names = part_names(path, linear)
    schemes = {name: _scheme(name, quantization, held.get(name, {})) for name in names}
    if len({*schemes.values()}) > 1:
        found = ", ".join(f"{name} {scheme.name if scheme else 'not'}" for name, scheme in schemes.items())
        raise CheckpointError(
            f"layers that are merged into one are quantized differently: {found}",
            "quantize all of them in the same way, or none",
        )
    scheme = schemes[names[0]]
    if scheme is None:
        return None
    if isinstance(linear, GroupedLinear) and linear.bias is not None and not scheme.expert_biases:
        raise ConfigError(
            f"{path} has biases, and hal computes experts of the scheme {scheme.name} without",
            "load the unquantized checkpoint",
        )
    if weights == AUTO and scheme.name in requantized:
        # The int8 layers of experts have no biases.
        biased = isinstance(linear, GroupedLinear) and linear.bias is not None
        weights = DEQUANTIZED if biased else "w8a8_dynamic"
    representation = format.representation(scheme)
    if representation is None:
        raise ConfigError(
            f"the quantization scheme {scheme.name} has no representation in the checkpoint format {format.name}",
            f"add it to the representations of {type(scheme).__module__} or of {type(format).__module__}",
        )
    conversion = None if weights in (AUTO, KEPT, scheme.name) else Conversion(scheme, weights)
    return quantized_layer(linear, names, scheme, representation, conversion)


def quantized_layer(
    linear: Linear | GroupedLinear,
    names: tuple[str, ...],
    scheme: Scheme,
    representation: Representation,
    conversion: Conversion | None,
) -> QuantizedLayer:
    """Return the replacement of a layer. For the arguments, see :class:`QuantizedLayer`."""
    with torch.device("meta"):
        described = scheme.grouped_layer(linear) if isinstance(linear, GroupedLinear) else scheme.layer(linear)
        module = described if conversion is None else conversion.layer(linear)
    if isinstance(described, QuantizedLinear):
        described.converted = conversion is not None
    return QuantizedLayer(module, names, scheme, representation, described, conversion)


def check_divisible(layers: Mapping[str, QuantizedLayer], ranks: int) -> None:
    """Raise ConfigError if ranks would split a layer whose scheme's replacement they cannot split."""
    for layer in layers.values():
        if ranks > 1 and not hasattr(layer.module, "split"):
            raise ConfigError(
                f"{ranks} ranks cannot split {type(layer.module).__name__}, the layer of the quantization scheme "
                f"{layer.scheme.name} for {layer.names[0]}",
                "set parallel.tensor to 1, or derive the layer from hal.nn.QuantizedLinear, and call its join",
            )
