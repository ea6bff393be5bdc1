"""Conversion of quantized weights to floating point, or to another scheme, while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn

from hal.config.settings import QuantizedWeights
from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear, Weight
from hal.nn.low_bits import DequantizedGroupedLinear, DequantizedLinear
from hal.quantization.int8_arithmetic import quantize_weight
from hal.quantization.representation import Tensors
from hal.quantization.scheme import Scheme
from hal.quantization.scheme_registry import schemes

AUTO: Final = "auto"
KEPT: Final = "kept"
DEQUANTIZED: Final = "dequantized"


@attrs.frozen
class Conversion:
    """The conversion of a layer of one scheme.

    Attributes:
        stored: the scheme of the checkpoint.
        target: ``dequantized``, or the name of a scheme with int8 rows.
    """

    stored: Scheme
    target: QuantizedWeights

    def layer(self, linear: Linear | GroupedLinear) -> nn.Module:
        """Return the layer that computes in place of a linear one. Both are on the meta device.

        Raises:
            ConfigError: the target does not support biases of experts.
        """
        if self.target == DEQUANTIZED:
            return DequantizedLinear(linear) if isinstance(linear, Linear) else DequantizedGroupedLinear(linear)
        scheme = schemes()[self.target]
        if isinstance(linear, Linear):
            return scheme.layer(linear)
        if linear.bias is not None and not scheme.expert_biases:
            raise ConfigError(
                f"the experts have biases, which the scheme {self.target} does not support",
                "set quantized_weights to kept or dequantized",
            )
        return scheme.grouped_layer(linear)

    def tensors(self, finished: Tensors, name: str, width: int, num_experts: int | None) -> Tensors:
        """Return the tensors of the layer that :meth:`layer` returned.

        Args:
            finished: those of the checkpoint's scheme.
            name: the layer's name, for errors.
            width: its in_features.
            num_experts: the number of experts of this rank, or None.
        """
        if num_experts is None:
            found = self._converted(finished, name, width)
        else:
            of_each = [
                self._converted(
                    {key: each if each is None else each[expert] for key, each in finished.items()}, name, width
                )
                for expert in range(num_experts)
            ]
            found = {key: torch.stack([each[key] for each in of_each]) for key in of_each[0]}
        return {**found, "bias": finished.get("bias")}

    def _converted(self, finished: Tensors, name: str, width: int) -> dict[str, Tensor]:
        wide = self.stored.dequantize(finished, width)
        if self.target == DEQUANTIZED:
            return {"weight": wide}
        values, scale = quantize_weight(name, wide)
        return {"weight": values, "weight_scale": scale}


def weights_bytes(module: nn.Module, computing: torch.dtype) -> int:
    """Return the bytes of the tensors that a layer declares, of all ranks.

    Args:
        module: the layer.
        computing: the dtype of computation, that of tensors without a declared one.
    """
    declared: Mapping[str, Weight] = getattr(module, "weights", {})
    absent = ("weight_zero_point",) * getattr(module, "symmetric", False)
    sizes: Any = [
        torch.Size(each.shape(each.sizes)).numel() * (each.dtype or computing).itemsize
        for name, each in declared.items()
        if each.sizes is not None and name not in absent and getattr(module, name, None) is not None
    ]
    return sum(sizes)
