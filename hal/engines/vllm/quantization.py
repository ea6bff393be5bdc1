"""Quantization methods as vLLM's configuration knows them. hal reads the checkpoint's scheme itself.

vLLM checks a checkpoint's ``quantization_config`` for its own kernels, which lack some dtypes and schemes of hal's.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

METHODS = ("auto_awq", "auto_gptq", "awq", "compressed-tensors", "fp8", "gpt_oss_mxfp4", "gptq", "mxfp4")
"""vLLM's names of the methods whose checkpoints hal reads."""


class ReadByHal(QuantizationConfig):
    """A method of which vLLM checks nothing."""

    method = ""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the method. hal checks the section when it loads the checkpoint."""
        return cls()

    def get_name(self) -> Any:
        """Return vLLM's name of the method."""
        return self.method

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of hal."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return that any device will do."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return that no other file describes the method."""
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> None:
        """Return that vLLM has no layers."""


def register() -> None:
    """Replace vLLM's classes of the methods."""
    for name in METHODS:
        if name in QUANTIZATION_METHODS:
            register_quantization_config(name)(type("ReadByHal", (ReadByHal,), {"method": name}))
