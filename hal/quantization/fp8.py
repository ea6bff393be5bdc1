"""The format of float8 weights in blocks, with ``quant_method`` ``fp8`` in config.json, as DeepSeek publishes them.

Source: the documentation of transformers' FineGrainedFP8Config; ``weight_scale_inv`` multiplies, despite its name.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from hal.errors import ConfigError
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization
from hal.quantization.excluded_layers import ExcludedLayers
from hal.quantization.fp8_scales import Fp8Scales


class Fp8Blocks(CheckpointFormat):
    """The format of float8 weights."""

    name = "fp8"
    representations = MappingProxyType({"fp8": Fp8Scales(None, ("weight_scale_inv", "weight_scale"))})

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is None or section.content.get("quant_method") != self.name:
            return None
        content, where = section.content, section.name
        if (kind := content.get("fmt", "e4m3")) != "e4m3":
            raise ConfigError(f"{where} has fmt {kind!r:.60}, which hal does not support", "use e4m3")
        block = content.get("weight_block_size")
        scheme, _ = self.known()["fp8"]
        strategy = "tensor" if block is None else "block"
        configured = scheme.configured({"strategy": strategy, "block_structure": block})
        excluded = content.get("modules_to_not_convert", content.get("ignored_layers"))
        return ExcludedLayers(configured, excluded, where)
