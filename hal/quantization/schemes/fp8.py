"""``fp8``: float8 weights with a scale for each block, output channel or tensor, and floating-point activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from hal.errors import ConfigError
from hal.nn import GroupedLinear, Linear, Projection
from hal.nn.low_bits import Fp8GroupedLinear, Fp8Linear
from hal.ops.float8 import widen
from hal.quantization.compressed_tensors import COMPRESSED_TENSORS
from hal.quantization.fp8_scales import CompressedFp8
from hal.quantization.packed_tensors import FloatGroup
from hal.quantization.representation import Tensors
from hal.quantization.scheme import Scheme

Strategy = Literal["block", "channel", "tensor"]


class Fp8(Scheme):
    """Float8 weights. Activations stay floating-point, whatever the checkpoint says of them.

    Args:
        strategy: what has one scale: a block, an output channel, or a tensor of the checkpoint.
        block: the outputs and the inputs of a block.
    """

    name = "fp8"
    expert_biases = True
    summary = "float8 weights with a scale for each block, output channel or tensor"
    representations: ClassVar = {
        COMPRESSED_TENSORS: CompressedFp8(
            FloatGroup(
                {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False},
                None,
                "float-quantized",
                frozenset({"strategy", "block_structure"}),
            ),
            ("weight_scale", "weight_scale"),
        )
    }

    def __init__(self, strategy: Strategy = "channel", block: tuple[int, int] = (128, 128)) -> None:
        self.strategy, self.block = strategy, block

    def configured(self, settings: Mapping[str, Any]) -> Scheme:
        """Return the scheme for ``strategy`` and ``block_structure``."""
        strategy, block = settings.get("strategy"), settings.get("block_structure")
        if strategy not in ("block", "channel", "tensor"):
            raise ConfigError(f"the strategy of float8 weights is {strategy!r:.60}", "use block, channel or tensor")
        if strategy != "block" and block is None:
            return Fp8(strategy)
        if strategy != "block":
            problem = f"float8 weights have the strategy {strategy!r} and blocks of {block!r:.60}"
            raise ConfigError(problem, "use the strategy block, or set block_structure to null")
        if not (isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)):
            raise ConfigError(f"the blocks of float8 weights are {block!r:.60}", "use two positive sizes: [128, 128]")
        return Fp8(strategy, (block[0], block[1]))

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"strategy": self.strategy, "block_structure": [*self.block] if self.strategy == "block" else None}

    def layer(self, linear: Linear) -> Fp8Linear:
        return Fp8Linear(linear, **self._settings(linear))

    def grouped_layer(self, linear: GroupedLinear) -> Fp8GroupedLinear:
        return Fp8GroupedLinear(linear, **self._settings(linear))

    def dequantize(self, tensors: Tensors, width: int) -> Tensor:
        weight, scale = tensors["weight"], tensors["weight_scale"]
        assert weight is not None
        assert scale is not None
        return widen(weight, scale, *self._block(width))

    def _block(self, width: int) -> tuple[int, int]:
        return self.block if self.strategy == "block" else (1, width)

    def _settings(self, linear: Projection) -> dict[str, Any]:
        fused = getattr(linear, "fused", None)
        if fused is not None and self.strategy != "block":
            raise ConfigError(
                f"the checkpoint has {fused} of all experts as one tensor in float8 with a scale by {self.strategy}",
                "use a checkpoint with blocks (weight_block_size), or with a tensor for each expert",
            )
        return {"block": self._block(linear.in_features), "strategy": self.strategy, "fused": fused}
