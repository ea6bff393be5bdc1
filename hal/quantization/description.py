"""What a checkpoint says about its quantisation: which layers, by which scheme, in which tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import torch
from torch import Tensor

from hal.errors import CheckpointError, ConfigError
from hal.files import read_json
from hal.quantization.arithmetic import AGAIN, Activation, DynamicLayer, StaticLayer

Scheme = Literal["w8a8", "w8a8_dynamic"]
SUPPORTED = (
    "hal reads int8 weights with a scale for each output channel, and int8 activations, static per tensor or dynamic "
    "per token, as compressed-tensors or ModelSlim write them"
)
KEYS = ("quantization_config", "quantize")
"""What config.json may say about quantisation, and models do not read."""

Shapes = tuple[tuple[int, ...], ...]
INTEGERS = frozenset({"I8", "I32", "I64"})
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})


@attrs.frozen
class TensorSpec:
    """What a tensor beside a quantised weight may look like.

    Attributes:
        shapes: any of these.
        dtypes: any of these, as safetensors name them.
        required: whether the checkpoint must hold it.
    """

    shapes: Shapes
    dtypes: frozenset[str] = FLOATS
    required: bool = True

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """What is wrong with a tensor of this shape and dtype."""
        if shape not in self.shapes:
            return f"is {list(shape)}, not {list(self.shapes[0])}"
        return None if dtype in self.dtypes else f"is {dtype}, not {' or '.join(sorted(self.dtypes))}"


class Quantization(ABC):
    """A checkpoint's quantisation, in one of the formats.

    Attributes:
        format: its name.
    """

    format: ClassVar[str]

    @abstractmethod
    def scheme(self, layer: str) -> Scheme | None:
        """How the layer of that name in the checkpoint is quantised; None if it is not.

        Raises:
            CheckpointError: it is quantised in a way that hal does not read, or nothing says how.
        """

    @abstractmethod
    def tensors(self, scheme: Scheme, rows: int, bias: bool) -> Mapping[str, TensorSpec]:
        """What lies beside the weight of a quantised layer, by the last part of the name.

        Args:
            scheme: of the layer.
            rows: of its weight.
            bias: whether the model's layer has one.
        """

    @abstractmethod
    def static_layer(self, name: str, tensors: Mapping[str, Tensor], row_sums: Tensor) -> StaticLayer:
        """A layer of the scheme ``w8a8`` from its :meth:`tensors` and the sums of its weight's rows, int64.

        Raises:
            CheckpointError: a number is not one that it can be.
        """

    @abstractmethod
    def dynamic_layer(self, name: str, tensors: Mapping[str, Tensor]) -> DynamicLayer:
        """A layer of the scheme ``w8a8_dynamic`` from its :meth:`tensors`.

        Raises:
            CheckpointError: a number is not one that it can be.
        """


class Writer(ABC):
    """Writes a format.

    Attributes:
        symmetric: whether its static activations have the offset 0.
    """

    symmetric: ClassVar[bool]

    @abstractmethod
    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the scale of static activations is stored in, in a checkpoint of ``dtype``."""

    @abstractmethod
    def layer(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, activation: Activation | None, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The tensors of a layer, by the last part of the name.

        Args:
            weight: ``[rows, columns]``, int8.
            scale: ``[rows]``, float32.
            bias: ``[rows]``, floating, or None.
            activation: of the input; None where that is found for each token.
            dtype: of the checkpoint.
        """

    @abstractmethod
    def describe(
        self, config: Mapping[str, Any], scheme: Scheme, kept: Iterable[str], tensors: Mapping[str, bool]
    ) -> dict[str, dict[str, Any]]:
        """The JSON files that describe the checkpoint, by name; config.json is one.

        Args:
            config: config.json of the checkpoint that was quantised.
            scheme: of the layers.
            kept: linear layers that are not quantised.
            tensors: all tensors' names, and whether each belongs to a quantised layer.
        """


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """What the checkpoint in ``folder``, with this config.json, says about its quantisation; None if nothing.

    Raises:
        ConfigError: it is quantised in a way that hal does not read.
        CheckpointError: its description is damaged.
    """
    from hal.quantization.compressed_tensors import CompressedTensors
    from hal.quantization.modelslim import ModelSlim

    section = config.get("quantization_config")
    if section is not None and not isinstance(section, dict):
        raise ConfigError(f"quantization_config in config.json is {section!r:.60}, no table", AGAIN)
    descriptions = sorted(folder.glob(ModelSlim.PATTERN))
    if len(descriptions) > 1:
        raise CheckpointError(
            f"{folder} holds {len(descriptions)} quantisation descriptions: "
            f"{', '.join(file.name for file in descriptions)}",
            "remove those that are not meant",
        )
    if descriptions and section:
        raise CheckpointError(
            f"{folder} describes its quantisation twice, in config.json and in {descriptions[0].name}",
            "remove the one that is not meant",
        )
    if descriptions:
        return ModelSlim.read(descriptions[0].name, read_json(descriptions[0]))
    if not section:
        return None
    method = section.get("quant_method")
    if method != CompressedTensors.format:
        named = "without naming a quant_method" if method is None else f"by the method {method!r:.60}"
        raise ConfigError(
            f"config.json says the weights are quantised, {named}",
            f"{SUPPORTED}; or use a checkpoint in float32, bfloat16 or float16",
        )
    return CompressedTensors.read(section)


def zeros(name: str, what: str, values: Tensor | None) -> None:
    """Refuse weights that are quantised asymmetrically: ``values`` must all be 0.

    Raises:
        CheckpointError: they are not.
    """
    if values is not None and bool(values.double().ne(0).any()):
        raise CheckpointError(f"{name} has a {what} other than 0: its weights are asymmetric", SUPPORTED)
