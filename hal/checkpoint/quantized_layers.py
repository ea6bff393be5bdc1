"""Quantized layers of a model during loading: which they are, the form that each keeps, and what reads it.

A weight whose form the driver has no kernel for is converted to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import torch
from torch import Tensor, nn

from hal.checkpoint.checkpoint import Checkpoint
from hal.checkpoint.safetensors_files import DTYPES, TensorInfo
from hal.config.settings import QuantizedWeights
from hal.device.device import UNLIMITED, Limits
from hal.device.group import SOLO, Group
from hal.errors import CheckpointError, ConfigError
from hal.nn import AbsorbedLinear, CausalLM, GroupedLinear, Linear, MergedLinear, Weight
from hal.nn.linear import EXPERTS
from hal.nn.weights.weight import EQUALLY, source_name
from hal.ops.forms import FLOAT, Form, dequantize
from hal.parallel.mesh import Mesh
from hal.quantization.checkpoint_format import Quantization
from hal.quantization.forms import INT8, INT8_DYNAMIC, check_width, name_of
from hal.quantization.input_order import GROUPS
from hal.quantization.integer_arithmetic import int8_row_sums, quantize_weight
from hal.quantization.stored_layer import StoredAs, StoredLayer, Tensors

AUTO: Final = "auto"
KEPT: Final = "kept"
TARGETS: Final[Mapping[str, Form]] = {"dequantized": FLOAT, "w8a16": INT8, "w8a8_dynamic": INT8_DYNAMIC}
"""The forms that ``quantized_weights`` converts weights to."""


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """Yield the layers that a checkpoint quantizes by default: all linear ones except the output projection."""
    output = getattr(model, "output_projection", None)
    for path, module in model.named_modules():
        ours = type(module) in (Linear, MergedLinear, GroupedLinear)  # A subclass computes something else, and stays.
        if isinstance(module, Linear | GroupedLinear) and ours and path.rpartition(".")[2] != output:
            yield path, module


def part_names(path: str, layer: Linear | GroupedLinear) -> tuple[str, ...]:
    """Return the names of the checkpoint's layers that make up ``layer``, at ``path`` in the model."""
    return tuple(source_name(path, each).rpartition(".")[0] for each in layer.declare_stored("weight").sources)


@attrs.frozen(eq=False)
class QuantizedLayer:
    """A layer of a model whose weight the checkpoint keeps in another form.

    Attributes:
        module: the layer, which holds the form that it computes with.
        names: the names of its parts in the checkpoint.
        stored_as: the form of the stored weight, and what reads it.
        target: the form that the layer computes with, but for groups that ranks cut.
        biased: whether the model has a bias; that of a static form may hold only what an offset of inputs adds.
    """

    module: Linear | GroupedLinear
    names: tuple[str, ...]
    stored_as: StoredAs
    target: Form
    biased: bool

    @property
    def converted(self) -> bool:
        """Whether the weight is converted to another form when it is loaded."""
        return self.target != self.stored_as.form

    @property
    def declared(self) -> Mapping[str, Weight]:
        """The declarations of the layer's own tensors."""
        return self.module.weights

    def holds(self, name: str, weight: Weight) -> bool:
        """Return whether a tensor that is read is the layer's own, so that it is assembled on the device."""
        mine = self.declared.get(name)
        return not self.converted and name in ("weight", "bias") and mine is not None and mine.dtype == weight.dtype

    def stored(self, path: str, tensors: Mapping[str, TensorInfo], ranks: Group = SOLO) -> dict[str, Weight]:
        """Return the declarations of the tensors to read, with the dtypes that they have in the checkpoint.

        Args:
            path: the layer's path in the model.
            ranks: those that divide each layer. The layer takes the form of this rank's weight.
        """
        stored = self._stored(ranks)
        if not self.converted:
            self.module.form = stored.local_form
        read, found = self._read(stored), dict[str, Weight]()
        for name, weight in read.items():
            infos = [tensors[full] for each in weight.sources if (full := source_name(path, each)) in tensors]
            if weight.optional and not infos:
                continue
            if weight.dtype is None and weight.stored:
                dtypes = [DTYPES[info.dtype] for info in infos if DTYPES[info.dtype] in weight.stored]
                kept = (dtypes or weight.stored)[0]
                weight = attrs.evolve(weight, dtype=kept, stored=(kept,) if dtypes else weight.stored)
            if self.holds(name, weight):
                weight = attrs.evolve(weight, consumer=self.declared[name].consumer)
            found[name] = weight
        return found

    def finish(self, tensors: Tensors, mesh: Mesh) -> Tensors:
        """Return the layer's own tensors from those that were read.

        Raises:
            CheckpointError: a number is out of range, or the parts of the layer are inconsistent.
        """
        first = 0
        if self.module.shard == EXPERTS:
            assert self.module.num_experts is not None
            first, _ = EQUALLY.interval(self.module.num_experts, mesh.expert.rank, mesh.expert.size)
        stored = attrs.evolve(self._stored(mesh.tensor), tensors=tensors, first_expert=first)
        decoded = self.stored_as.reader.decode(stored)
        return converted(stored, decoded, self.module.form) if self.converted else decoded

    def _stored(self, ranks: Group) -> StoredLayer:
        return StoredLayer(self.module, self.stored_as.form, self.converted, ranks, self.names)

    def _read(self, stored: StoredLayer) -> Mapping[str, Weight]:
        read = self.stored_as.reader.declare(stored)
        given = "bias" in read or not self.module.biased or self.stored_as.form.inputs == "static_int8"
        return read if given else {"bias": self.module.stored_bias, **read}


def quantize_layers(
    model: CausalLM, checkpoint: Checkpoint, weights: QuantizedWeights = AUTO, limits: Limits = UNLIMITED
) -> dict[str, QuantizedLayer]:
    """Let the layers of a model that the checkpoint quantizes hold their forms, and return them by path.

    Args:
        model: without values.
        checkpoint: describes which layers are quantized.
        weights: what becomes of their weights; ``quantized_weights`` of a configuration.
        limits: those of a backend, with the names of forms that ``auto`` converts.

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
    layers += [(path, each) for path, each in model.named_modules() if isinstance(each, AbsorbedLinear)]
    found = {}
    for path, linear in layers:
        whole = tensors.get(path) if getattr(linear, "fused", None) is not None else None
        # The description names layers, and fused experts are none.
        if whole is not None and whole.is_floating_point:
            continue
        names = part_names(path, linear)
        stored_as = _stored_as(names, described[1], held)
        if stored_as is not None:
            requantized = weights == AUTO and name_of(stored_as.form) in limits.requantized
            target = TARGETS.get("w8a8_dynamic" if requantized else weights, stored_as.form)
            target = FLOAT if isinstance(linear, AbsorbedLinear) else target
            found[path] = quantized_layer(linear, names, stored_as, target)
    return found


def _stored_as(
    names: tuple[str, ...], quantization: Quantization, held: Mapping[str, Mapping[str, TensorInfo]]
) -> StoredAs | None:
    """Return how the parts of a layer are stored, all in the same way.

    Raises:
        CheckpointError: they are not.
    """
    found = {name: _of_part(name, quantization, held.get(name, {})) for name in names}
    if len({*found.values()}) > 1:
        parts = ", ".join(f"{name} {name_of(each.form) if each else 'not'}" for name, each in found.items())
        raise CheckpointError(
            f"layers that are merged into one are quantized differently: {parts}",
            "quantize all of them in the same way, or none",
        )
    return found[names[0]]


def _of_part(name: str, quantization: Quantization, held: Mapping[str, TensorInfo]) -> StoredAs | None:
    """Return how a checkpoint layer is stored. Its tensors say whether it is quantized, and the description how.

    Args:
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
    found = quantization.stored_as(stored)
    if found is None and not floating and (others := held.keys() - {"bias"}):
        raise CheckpointError(
            f"{quantization.exclusion(stored)} excludes {stored}, which has quantized {', '.join(sorted(others))[:80]}",
            "correct the description, or download the checkpoint again",
        )
    return found


def quantized_layer(
    linear: Linear | GroupedLinear, names: tuple[str, ...], stored_as: StoredAs, target: Form
) -> QuantizedLayer:
    """Let a layer hold its weight in a form, and return it. For the arguments, see :class:`QuantizedLayer`.

    Raises:
        ConfigError: the layer's size does not fit the form.
    """
    check_width(stored_as.form, linear.in_features)
    biased = linear.biased
    if target != FLOAT:
        with torch.device("meta"):
            linear.keep(target)
    return QuantizedLayer(linear, names, stored_as, target, biased)


def converted(stored: StoredLayer, decoded: Tensors, target: Form) -> Tensors:
    """Return the tensors of a layer in another form: floating-point numbers, or int8 with a scale for each row.

    Args:
        decoded: its tensors in the stored form. Those of experts are converted one after the other.
        target: the form to convert to.

    Raises:
        CheckpointError: a weight is not finite.
    """
    weight = decoded["weight"]
    assert weight is not None
    if stored.form.inputs == "static_int8":
        decoded = _without_input_scale(stored, decoded)
    decoded = {name: each for name, each in decoded.items() if name != "input_scale"}
    bias = {"bias": decoded.get("bias")}
    if stored.layer.num_experts is None:
        return {**_converted(stored, decoded, target), **bias}
    found = [
        _converted(stored, {key: None if each is None else each[expert] for key, each in decoded.items()}, target)
        for expert in range(weight.shape[0])
    ]
    return {**{key: torch.stack([each[key] for each in found]) for key in found[0]}, **bias}


def _without_input_scale(stored: StoredLayer, decoded: Tensors) -> Tensors:
    """Return int8 rows with scales of weights and a floating-point bias, from those for a static input."""
    weight, scale, given = decoded["weight"], decoded["weight_scale"], decoded["input_scale"]
    assert weight is not None
    assert scale is not None
    assert given is not None
    found, bias, offset = {"weight": weight, "weight_scale": scale / given[0]}, decoded["bias"], decoded["input_offset"]
    if not stored.layer.biased:  # All that it holds is the offset's part.
        return found
    counts = torch.zeros_like(scale[..., 0], dtype=torch.int64) if bias is None else bias.long()
    if offset is not None:
        counts = counts + offset.flatten()[0] * int8_row_sums(weight)
    return found | {"bias": (counts * scale.squeeze(-1).double()).float()}


def _converted(stored: StoredLayer, decoded: Tensors, target: Form) -> dict[str, Tensor]:
    wide = dequantized(stored.local_form, decoded)
    if target.numbers == "float":
        return {"weight": wide}
    values, scale = quantize_weight(stored.names[0], wide)
    return {"weight": values, "weight_scale": scale.unsqueeze(-1)}


def dequantized(form: Form, decoded: Tensors) -> Tensor:
    """Return the weight of a layer, or of one expert, in float32: ``[out_features, in_features]``."""
    weight, scale, zero = decoded["weight"], decoded.get("weight_scale"), decoded.get("weight_zero_point")
    assert weight is not None
    if scale is None:
        return weight.float()
    if (groups := decoded.get(GROUPS)) is None:
        return dequantize(form, weight, scale, zero)
    wide = form.kind.values(weight)
    if zero is not None:
        wide = wide - zero.float()[:, groups]
    return wide * scale.float()[:, groups]
