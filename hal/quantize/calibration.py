"""Calibration: the input ranges of a model's linear layers on a text, which static quantization needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hal.checkpoint.quantized_layers import linear_layers
from hal.drivers.backend import Backend
from hal.errors import CheckpointError, NumericsError
from hal.execution.runner import Runner
from hal.nn import CausalLM

WINDOW = 512
"""Maximum number of tokens per prefill; each starts with an empty cache."""


def input_ranges(
    model: CausalLM,
    backend: Backend,
    tokens: Sequence[int],
    *,
    window: int = WINDOW,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest input of each linear layer over ``tokens``, by the layer's path in the model.

    Args:
        model: floating-point model, loaded on ``backend``.
        backend: active backend.
        tokens: at least one token.
        window: maximum number of tokens per prefill; the model's maximum length also limits it.
        progress: called with the number of tokens read so far and in total.

    Raises:
        CheckpointError: ``tokens`` is empty.
        NumericsError: an input is not finite.
    """
    if not tokens:
        raise CheckpointError(
            "the calibration text has no tokens", "use a text that is representative of the model's use"
        )
    length = min(window, model.max_length, len(tokens))
    config = backend.config
    backend.configure(attrs.evolve(config, cache=attrs.evolve(config.cache, num_tokens=length)))
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [layer.register_forward_pre_hook(partial(_observe, seen, path)) for path, layer in linear_layers(model)]
    try:
        with Runner(model, backend) as runner:
            blocks = runner.blocks.take(runner.spec.blocks_for(length)) or []
            for start in range(0, len(tokens), length):
                runner.step(runner.batch([tokens[start : start + length]], [blocks]))
                progress(min(start + length, len(tokens)), len(tokens))
    finally:
        for hook in hooks:
            hook.remove()
        backend.configure(config)
    ranges = {path: (float(low), float(high)) for path, (low, high) in seen.items()}
    if wrong := [path for path, span in ranges.items() if not torch.tensor(span).isfinite().all()]:
        raise NumericsError(
            f"the input of {wrong[0]} is not finite on the calibration text",
            "check the weights; float16 overflows more easily than bfloat16 and float32",
        )
    return ranges


def _observe(seen: dict[str, tuple[Tensor, Tensor]], path: str, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    low, high = arguments[0].aminmax()
    if path in seen:
        low, high = torch.minimum(low, seen[path][0]), torch.maximum(high, seen[path][1])
    seen[path] = low, high
