"""The interface of quantization schemes: what a quantized layer computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn

from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear
from hal.quantization.representation import Representation, StoredLayer, Tensors


class Scheme(ABC):
    """A quantization scheme, registered in the entry-point group ``hal.quantization`` under its name.

    A scheme replaces linear layers with its layer, a :class:`hal.nn.QuantizedLinear`, whose ``weights`` declare the
    checkpoint's tensors. Values that are computed from several tensors are returned by :meth:`finish`.

    Attributes:
        name: the entry point's name.
        summary: a phrase that describes the computation, for errors.
        representations: how checkpoint formats store it, by format. A format may represent further schemes itself.
        expert_biases: whether its projections of experts may have biases.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    representations: ClassVar[Mapping[str, Representation]] = MappingProxyType({})
    expert_biases: ClassVar[bool] = False

    def __eq__(self, other: object) -> bool:
        """Return whether it computes the same: two of one class, with the same settings."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Return the same for equal schemes."""
        return hash(self.name)

    def represented(self, format: str) -> Representation | None:
        """Return how a checkpoint format of this name stores the scheme; None if the scheme does not say."""
        return self.representations.get(format)

    def configured(self, settings: Mapping[str, Any]) -> Scheme:
        """Return the scheme with the settings of a checkpoint, such as the size of groups; by default, itself.

        Args:
            settings: what the checkpoint's description says of the weights. Keys and values are not validated. Of
                compressed-tensors, ``format`` and ``input_activations`` are those of the group.

        Raises:
            ConfigError: the scheme does not support them.
        """
        return self

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a description says of the weights beside the scheme: what :meth:`configured` takes."""
        return {}

    @abstractmethod
    def layer(self, linear: Linear) -> nn.Module:
        """Return the layer that replaces a linear layer. Both are on the meta device."""

    def grouped_layer(self, linear: GroupedLinear) -> nn.Module:
        """Return the layer that replaces the projections of experts. Both are on the meta device.

        Raises:
            ConfigError: the scheme does not support experts, which is the default.
        """
        raise ConfigError(
            f"the scheme {self.name} does not quantize the projections of experts",
            "exclude them in the checkpoint's quantization config, or implement Scheme.grouped_layer",
        )

    def finish(self, stored: StoredLayer) -> Tensors:
        """Return the tensors of a layer from those that were read, before the driver prepares them.

        By default, they are those of the same name.

        Args:
            stored: the result of :meth:`Representation.decode <hal.quantization.representation.Representation.decode>`.

        Returns:
            A tensor, on any device, or None, for each tensor that the layer declares.

        Raises:
            CheckpointError: a number is invalid, or parts that are merged are incompatible.
        """
        return {name: stored.tensors[name] for name in stored.layer.weights if name in stored.tensors}

    def dequantize(self, tensors: Tensors, width: int) -> Tensor:
        """Return the weight of a layer, or of one expert, in float32: ``[out_features, in_features]``.

        Args:
            tensors: those that :meth:`finish` returned, of one expert without their first dimension.
            width: the layer's in_features.

        Raises:
            ConfigError: the scheme quantizes activations, too, or does not implement it, which is the default.
        """
        raise ConfigError(
            f"weights of the scheme {self.name} cannot be converted to another one at load",
            "set quantized_weights to kept",
        )
