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
        if (kind := section.value("fmt", default="e4m3")) != "e4m3":
            raise ConfigError(f"{section.name} has fmt {kind!r:.60}, which hal does not support", "use e4m3")
        block = section.value("weight_block_size")
        scheme, _ = self.known()["fp8"]
        strategy = "tensor" if block is None else "block"
        configured = scheme.configured({"strategy": strategy, "block_structure": block})
        found = ExcludedLayers(configured, section.lists("modules_to_not_convert", "ignored_layers"))
        if (activations := section.value("activation_scheme")) is not None:
            found.unapplied = (f"activation_scheme {activations!r:.60} of {section.name}",)
        return found
