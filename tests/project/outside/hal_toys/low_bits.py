"""Schemes with scales of groups, and formats that store them: 4-bit numbers packed in int32, and FP8 in blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal import ops
from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear, QuantizedLinear, Weight
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.compressed_tensors import COMPRESSED_TENSORS, ConfigGroup
from hal.quantization.representation import Representation, StoredLayer, Tensors
from hal.quantization.scheme import Scheme

IN, OUT = "in_features", "out_features"
EIGHT = 8
"""The numbers of 4 bits in an int32."""


def unpack(packed: Tensor, dim: int) -> Tensor:
    """Return the numbers from 0 to 15 that each int32 holds along a negative dimension, the lowest bits first."""
    nibbles = (packed.unsqueeze(dim) >> torch.arange(0, 32, 4).view(-1, *[1] * (-dim - 1))) & 15
    return nibbles.flatten(dim - 1, dim)


class Dequantized(QuantizedLinear):
    """A projection that dequantizes its weight in every step, in plain torch."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """Return the weight of this rank, ``[out_features, in_features]``, of experts with a first dimension more."""


class Single(Dequantized):
    """A single projection."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self.join(ops.linear(x, self.dequantized().to(x.dtype), self.bias))

    if TYPE_CHECKING:
        __call__ = forward


class OfExperts(Dequantized):
    """The projections of experts."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map ``[assignments, in_features]`` to ``[assignments, out_features]``."""
        return ops.grouped_linear(x, self.dequantized().to(x.dtype), counts)

    if TYPE_CHECKING:
        __call__ = forward


class Int4Tensors(Dequantized):
    """4-bit numbers, with a scale and a zero point for each group of inputs.

    Attributes:
        group_size: the inputs of a group.
    """

    group_size: int
    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations, as compressed-tensors stores them."""
        of_groups = {IN: self.group_size}
        return {
            "weight_packed": self.declare("weight_packed", packing={IN: EIGHT}, dtype=torch.int32),
            "weight_scale": self.declare("weight_scale", group_sizes=of_groups, dtype=torch.float32),
            "weight_zero_point": self.declare(
                "weight_zero_point", group_sizes=of_groups, packing={OUT: EIGHT}, dtype=torch.int32
            ),
            "bias": self.declare("bias", OUT, added=True),
        }

    def dequantized(self) -> Tensor:
        numbers, zero = unpack(self.weight_packed, -1), unpack(self.weight_zero_point, -2)
        width = numbers.shape[-1]
        each = [part.repeat_interleave(self.group_size, -1)[..., :width] for part in (zero, self.weight_scale)]
        return (numbers - each[0]) * each[1]


class Int4Linear(Int4Tensors, Single):
    """A projection of 4-bit numbers."""


class Int4GroupedLinear(Int4Tensors, OfExperts):
    """Experts' projections of 4-bit numbers."""


class Int4Groups(Scheme):
    """Asymmetric 4-bit weights in groups.

    Attributes:
        group_size: the inputs of a group.
    """

    name = "toy_int4"
    summary = "4-bit weights with a scale and a zero point for each group of inputs, and floating-point activations"
    representations = {  # noqa: RUF012 - a constant
        COMPRESSED_TENSORS: Representation(
            ConfigGroup(
                {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "dynamic": False},
                None,
                "toy-packed",
                settings=frozenset({"group_size"}),
            )
        )
    }

    def __init__(self, group_size: int = 128) -> None:
        self.group_size = group_size

    def configured(self, settings: Mapping[str, Any]) -> Scheme:
        size = settings.get("group_size")
        if type(size) is not int or size < 1:
            raise ConfigError(f"the group_size is {size!r:.60}", "make it a positive number")
        return Int4Groups(size)

    def layer(self, linear: Linear) -> Int4Linear:
        return Int4Linear(linear, group_size=self.group_size)

    def grouped_layer(self, linear: GroupedLinear) -> Int4GroupedLinear:
        return Int4GroupedLinear(linear, group_size=self.group_size)


class Transposed4Bits(Representation):
    """The tensors of AWQ: ``[inputs, outputs]``, eight outputs in an int32, in another order."""

    order = (0, 4, 1, 5, 2, 6, 3, 7)
    """The nibble of each output."""

    def declare(self, layer: QuantizedLinear) -> Mapping[str, Weight]:
        assert isinstance(layer, Int4Tensors)
        axes, of_groups, eight = f"{IN} {OUT}", {IN: layer.group_size}, {OUT: EIGHT}
        return {
            "weight_packed": layer.declare("qweight", axes, packing=eight, dtype=torch.int32),
            "weight_scale": layer.declare("scales", axes, group_sizes=of_groups, dtype=torch.float32),
            "weight_zero_point": layer.declare("qzeros", axes, group_sizes=of_groups, packing=eight, dtype=torch.int32),
        }

    def decode(self, stored: StoredLayer) -> Tensors:
        numbers, zero = (self._unpacked(stored[name]) for name in ("weight_packed", "weight_zero_point"))
        found = {
            "weight_packed": pack(numbers, -1),
            "weight_scale": stored["weight_scale"].transpose(-1, -2),
            "weight_zero_point": pack(zero, -2),
        }
        return {**stored.tensors, **found}

    def _unpacked(self, packed: Tensor) -> Tensor:
        numbers = unpack(packed, -1).unflatten(-1, (-1, EIGHT))
        return numbers[..., list(self.order)].flatten(-2).transpose(-1, -2)


def pack(numbers: Tensor, dim: int) -> Tensor:
    """Return the int32 tensor that :func:`unpack` takes."""
    shifts = torch.arange(0, 32, 4).view(-1, *[1] * (-dim - 1))
    wide = (numbers.long().unflatten(dim, (-1, EIGHT)) << shifts).sum(dim)
    return wide.to(torch.uint32).view(torch.int32)


class AllLayers(Quantization):
    """One scheme for all layers."""

    def __init__(self, found: Scheme) -> None:
        self._found = found

    def scheme(self, layer: str) -> Scheme | None:
        return self._found


class ToyAwq(CheckpointFormat):
    """A format that stores another scheme's 4-bit numbers in its own way."""

    name = "toy_awq"
    representations = {Int4Groups.name: Transposed4Bits(None)}  # noqa: RUF012 - a constant

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        scheme, _ = self.known()[Int4Groups.name]
        return AllLayers(scheme.configured(section.content))


class Fp8Tensors(Dequantized):
    """FP8 numbers, with a scale for each block of outputs and inputs.

    Attributes:
        block: the outputs and the inputs of a block.
    """

    block: tuple[int, int]
    weight: Tensor
    weight_scale_inv: Tensor

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The declarations."""
        blocks = {OUT: self.block[0], IN: self.block[1]}
        return {
            "weight": self.declare("weight", dtype=torch.float8_e4m3fn),
            "weight_scale_inv": self.declare("weight_scale_inv", group_sizes=blocks, dtype=torch.float32),
            "bias": self.declare("bias", OUT, added=True),
        }

    def dequantized(self) -> Tensor:
        rows, columns = self.weight.shape[-2:]
        scale = self.weight_scale_inv.repeat_interleave(self.block[0], -2).repeat_interleave(self.block[1], -1)
        return self.weight.float() * scale[..., :rows, :columns]


class Fp8Linear(Fp8Tensors, Single):
    """A projection of FP8 numbers."""


class Fp8GroupedLinear(Fp8Tensors, OfExperts):
    """Experts' projections of FP8 numbers."""


class Fp8Blocks(Scheme):
    """FP8 weights in blocks.

    Attributes:
        block: the outputs and the inputs of a block.
    """

    name = "toy_fp8"
    summary = "FP8 weights with a scale for each block, and floating-point activations"

    def __init__(self, block: tuple[int, int] = (128, 128)) -> None:
        self.block = block

    def configured(self, settings: Mapping[str, Any]) -> Scheme:
        rows, columns = settings["weight_block_size"]
        return Fp8Blocks((rows, columns))

    def layer(self, linear: Linear) -> Fp8Linear:
        return Fp8Linear(linear, block=self.block)

    def grouped_layer(self, linear: GroupedLinear) -> Fp8GroupedLinear:
        return Fp8GroupedLinear(linear, block=self.block)


class ToyFp8(CheckpointFormat):
    """A format of FP8 weights."""

    name = "toy_fp8"
    representations = {Fp8Blocks.name: Representation(None)}  # noqa: RUF012 - a constant

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        scheme, _ = self.known()[Fp8Blocks.name]
        return AllLayers(scheme.configured(section.content))
