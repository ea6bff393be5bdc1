"""The scaling of rotary positions in the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import torch

from hal.checkpoint.gguf.gguf_header import GgufTensor
from hal.checkpoint.gguf.metadata import Metadata
from hal.checkpoint.gguf.tensor_types import Rows
from hal.errors import CheckpointError
from hal.nn.rope_parameters import Llama3Rope

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of all published models of Llama 3.1 to 3.3. A file has only the divisors that follow from them."""


def rope_scaling(metadata: Metadata, divisors: GgufTensor | None, width: int, theta: float) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` of config.json; None without scaling.

    Args:
        metadata: the metadata.
        divisors: the tensor with a divisor of each frequency, which files of Llama 3.1 have.
        width: the number of rotated elements of a head.
        theta: the base of the frequencies.

    Raises:
        CheckpointError: hal does not have the kind of scaling, or its parameters are damaged.
    """
    kind = metadata.text(".rope.scaling.type", "none")
    if divisors is not None:
        if kind not in ("none", "llama3"):
            raise CheckpointError(f"the file has divisors of frequencies beside the scaling {kind!r:.40}", _ELSE)
        return _llama3(divisors, width, theta)
    # Older files have a factor without a type.
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 0.0))
    original = metadata.integer(".rope.scaling.original_context_length", metadata.integer(".context_length"))
    if kind == "none" and (".rope.scaling.type" in metadata or factor in (0.0, 1.0)):
        return None
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(f"rope.scaling.type is {kind!r:.40}, which hal does not read", _ELSE)
    if factor == 0.0:
        raise CheckpointError(f"rope.scaling.type is {kind}, and there is no rope.scaling.factor", _ELSE)
    if kind != "yarn":
        return {"rope_type": "linear", "factor": factor}
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, name in ((".rope.scaling.yarn_beta_fast", "beta_fast"), (".rope.scaling.yarn_beta_slow", "beta_slow")):
        if key in metadata:
            found[name] = metadata.number(key)
    more = metadata.number(".rope.scaling.attn_factor", metadata.number(".rope.scaling.yarn_attn_factor", 1.0))
    if more != 1.0:  # llama.cpp multiplies by it; config.json has the product
        found["attention_factor"] = more * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return found


_ELSE = "use the model's safetensors files"


def _llama3(tensor: GgufTensor, width: int, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's scaling that give the divisors of a file."""
    if tensor.shape != (width // 2,) or tensor.type.name != "F32":
        raise CheckpointError(
            f"rope_freqs.weight is {tensor.type.name} of the shape {[*tensor.shape]}, expected F32 of [{width // 2}]",
            "download the file again",
        )
    with Rows(tensor.file) as rows:
        given = rows.read(tensor.type, tensor.start, 0, 1, width // 2)[0]
    factor = float(given.max())
    if math.isfinite(factor) and factor >= 1.0 and theta > 1.0:
        device = torch.device("cpu")
        rope = Llama3Rope(rope_theta=theta, factor=factor, **LLAMA3)  # type: ignore[arg-type]
        plain = Llama3Rope(rope_theta=theta, factor=1.0, **LLAMA3)  # type: ignore[arg-type]
        if torch.allclose(plain.inv_freq(width, device) / rope.inv_freq(width, device), given, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise CheckpointError("rope_freqs.weight has other divisors of frequencies than Llama 3's scaling gives", _ELSE)
