"""The format of bitsandbytes, which hal refuses: its kernels and its tables of numbers are those of CUDA."""

from __future__ import annotations

from pathlib import Path

from hal.errors import ConfigError
from hal.quantization.checkpoint_format import CheckpointFormat, ConfigSection, Quantization


class Bitsandbytes(CheckpointFormat):
    """The format of bitsandbytes."""

    name = "bitsandbytes"

    def read(self, folder: Path, section: ConfigSection | None) -> Quantization | None:
        if section is not None and section.content.get("quant_method") == self.name:
            raise ConfigError(
                f"{section.name} has the quant_method {self.name!r}, which hal does not support",
                "load the original checkpoint, and quantize it with `hal quantize --scheme w4a16` if it is too large; "
                "or save the dequantized model with transformers (model.dequantize(), then save_pretrained)",
            )
        return None
