"""Checkpoints of 8 and 4 bits whose groups two and four ranks can cut, and their logits on ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import random_checkpoint, write_json
from helpers.gguf_writing import write_gguf
from helpers.low_bits import DENSE, SPARSE, WHOLE, Format, gpt_oss_pair, modelslim, pair
from helpers.quantized import DESCRIPTION, Scheme, entries, quantized

WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 64, "num_key_value_heads": 4, "num_hidden_layers": 1}
"""Sizes of whole groups of 32 on each of four ranks."""
SIZES = {
    "dense": {**DENSE, **WIDE, "intermediate_size": 256},
    "sparse": {**SPARSE, **WIDE, "moe_intermediate_size": 256},
}
SCHEMES: dict[str, Scheme] = {"q_proj": "w8a8", "k_proj": "w8a8", "v_proj": "w8a8", "gate_proj": "w8a8_dynamic"}
SCHEMES |= {"up_proj": "w8a8_dynamic", "down_proj": "w8a16", "o_proj": "w8a8"}
"""The types of a checkpoint of ModelSlim; layers without one are not quantized."""
FORMATS = {
    "packed": Format("compressed-tensors", symmetric=True),
    "packed-8-bits": Format("compressed-tensors", bits=8),
    "packed-a8": Format("compressed-tensors", symmetric=True, activations=True),
    "whole-a8": Format(WHOLE, symmetric=True, activations=True),
    "whole-rows-a8": Format(WHOLE, group=0, symmetric=True, activations=True),
    "awq": Format("awq", dtype=torch.float16),
    "gptq": Format("gptq", dtype=torch.float16),
    "gptq-8-bits": Format("gptq", bits=8, symmetric=True),
    "gptq_v2": Format("gptq_v2"),
    "fp8-blocks": Format("fp8"),
    "nvfp4": Format("nvfp4-pack-quantized"),
}
GGUF = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@attrs.frozen
class Case:
    """A checkpoint.

    Attributes:
        write: writes it into a folder.
        rounded: whether activations are rounded to int8, where ranks that divide a row have another scale for it.
        config: further keys of the configuration.
    """

    write: Callable[[Path], Path]
    rounded: bool = False
    config: dict[str, Any] = attrs.field(factory=dict)


def _of_format(format: Format, sizes: dict[str, Any], folder: Path) -> Path:
    return pair(folder, format, **sizes)[0]


def _of_modelslim(group: int, sizes: dict[str, Any], folder: Path) -> Path:
    made, _ = pair(folder, Format(WHOLE, group=group, symmetric=True, activations=True), **sizes)
    modelslim(made, group)
    return made


def _mixed(sizes: dict[str, Any], folder: Path) -> Path:
    """Write a checkpoint of ModelSlim with another type for each layer."""
    made, types, written = random_checkpoint(folder, **sizes), dict[str, str](), dict[str, torch.Tensor]()
    tensors = load_file(made / "model.safetensors")
    for full, tensor in tensors.items():
        name, _, suffix = full.rpartition(".")
        scheme = SCHEMES.get(name.rpartition(".")[2])
        if scheme is None:
            written[full], types[full] = tensor, "FLOAT"
        elif suffix == "weight":
            found = entries(quantized(tensors, name, 0.03, -7), name, "modelslim", scheme, bits=False)
            written, types = written | found, types | dict.fromkeys(found, scheme.upper())
    save_file(written, made / "model.safetensors")
    write_json(made / DESCRIPTION, {"model_quant_type": "W8A8", "version": "1.0.0", "group_size": 0, **types})
    return made


def _of_gguf(kind: str, sizes: dict[str, Any], folder: Path) -> Path:
    wide = {"hidden_size": 256} if kind.endswith("_K") else {}
    plain = random_checkpoint(folder / "plain", **{**sizes, **wide, "attention_bias": False})
    return write_gguf(plain, folder / "model.gguf", kind=kind)


def _of_gpt_oss(folder: Path) -> Path:
    return gpt_oss_pair(folder, intermediate_size=128, num_hidden_layers=1, layer_types=["full_attention"])[0]


CASES = {"mxfp4": Case(_of_gpt_oss)}
for _name, _sizes in SIZES.items():
    CASES |= {
        f"{name}-{_name}": Case(partial(_of_format, format, _sizes), format.activations)
        for name, format in FORMATS.items()
    }
    CASES |= {
        f"modelslim-w4a8-{group}-{_name}": Case(partial(_of_modelslim, group, _sizes), rounded=True)
        for group in (0, 32)
    }
    CASES[f"gptq-ordered-{_name}"] = Case(partial(_of_format, Format("gptq", ordered=True), _sizes))
    CASES[f"gptq-converted-{_name}"] = attrs.evolve(
        CASES[f"gptq-ordered-{_name}"], config={"quantized_weights": "dequantized"}
    )
    CASES[f"modelslim-mixed-{_name}"] = Case(partial(_mixed, _sizes), rounded=True)
    CASES |= {
        f"{kind}-{_name}": Case(partial(_of_gguf, kind, _sizes), config={"quantized_weights": "kept"}) for kind in GGUF
    }
