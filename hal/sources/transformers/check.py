"""The comparison of a loaded model with transformers' own model, on two short sequences."""

from __future__ import annotations

import logging
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as logging_of_transformers

from hal.errors import ConfigError
from hal.sources.transformers.architecture import class_of
from hal.sources.transformers.buffers import settle
from hal.sources.transformers.phase import NAME, REMEDY
from hal.step import StateSpec

BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""How far logits may differ, in parts of the largest, by the dtype of computation."""
LENGTHS = (8, 5)
"""The tokens of the sequences: prompts of all but two, then a step of each of those."""
MOST_BYTES = 2 << 30
"""The size of the weights up to which transformers loads them too. It keeps them in the host's memory."""

log = logging.getLogger("hal.checkpoint")


def check_logits(model: Any, backend: Any, checkpoint: Any) -> None:
    """Raise ConfigError unless steps through the cache give the logits of transformers' own model.

    transformers loads the checkpoint once more, on the CPU and without a layer of hal's, so that a layer that was
    replaced by another one or a tensor that was read from the wrong place is found. If it is larger than
    :data:`MOST_BYTES` or quantized, the model is compared with transformers' forward over hal's layers, which finds
    attention of another kind, a state that is not in the cache, positions that a model counts itself, and layers in
    which the sequences of a batch see each other.

    Args:
        model: a loaded model.
        backend: its backend, entered.
    """
    device, dtype = backend.device.torch, next(model.parameters()).dtype
    rows = [[(7 * place + 5 * row + 3) % model.vocab_size for place in range(n)] for row, n in enumerate(LENGTHS)]
    own = untouched(model, checkpoint, dtype)
    if own is None:
        wanted = [_own_forward(model, torch.tensor([row], device=device)) for row in rows]
    else:
        wanted = [own(input_ids=torch.tensor([row]), use_cache=False).logits[0].to(device) for row in rows]
    size = -(-max(LENGTHS) // backend.block_size)
    blocks = [list(range(1, 1 + size)), list(range(1 + size, 1 + 2 * size))]
    memory = backend.allocate(StateSpec(tuple(model.states), dtype, 1 + 2 * size, backend.block_size))
    differences = []
    for start, stop in ((0, -2), (-2, -1), (-1, None)) if model.causal else ((0, None),):
        cached = [0 if start == 0 else len(row) + start for row in rows]
        batch = model.batch_type.build(
            [row[start:stop] for row in rows],
            blocks,
            block_size=backend.block_size,
            cached=cached,
            device=device,
        )
        ends = batch.query_start_loc[1:] - 1
        found = model.logits(model(batch, memory.layers)[ends])
        for logits, row, each in zip(found, rows, wanted, strict=True):
            expected = each[len(row) - 1 if stop is None else len(row) + stop - 1]
            differences.append(float((logits - expected).abs().max() / expected.abs().max()))
    # In 16 bits, rounding may route a token to another expert.
    worst = max(differences) if dtype.itemsize > 2 else median(differences)
    if not worst <= BOUNDS[dtype]:  # NaN fails
        raise ConfigError(
            f"{model.of.__name__} of transformers gives other logits over hal's cache than by itself: they differ by "
            f"{worst:.1e} of the largest",
            f"{REMEDY}; check_model=false in hal's configuration omits this comparison",
        )


def untouched(model: Any, checkpoint: Any, dtype: torch.dtype) -> Any:
    """Return transformers' own model with the weights of a checkpoint, on the CPU; None if it cannot be had.

    Args:
        dtype: of the weights and of the computation.
    """
    size = sum(each.nbytes for each in checkpoint.tensors.values())
    if checkpoint.quantization is not None or size > MOST_BYTES:
        why = "is quantized" if checkpoint.quantization is not None else f"has {size / 2**30:.1f} GiB of weights"
        log.info("%s %s: it is compared with transformers' forward over hal's layers", model.of.__name__, why)
        return None
    weights = {name: values.clone() for name, values in checkpoint.read(checkpoint.tensors)}
    progress = logging_of_transformers.is_progress_bar_enabled()
    logging_of_transformers.disable_progress_bar()
    try:
        found, _ = model.of.from_pretrained(
            None,
            config=class_of(checkpoint.model_config)[1],
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    finally:
        if progress:
            logging_of_transformers.enable_progress_bar()
    settle(found, model.max_length)
    return found.eval()


def _own_forward(model: Any, token_ids: Tensor) -> Tensor:
    """Return the logits ``[tokens, vocab_size]`` of one sequence, with attention as transformers spells it out."""
    try:
        model.config._attn_implementation = "eager"
        found: Tensor = model.of.forward(model, input_ids=token_ids, use_cache=False, return_dict=True).logits[0]
        return found
    finally:
        model.config._attn_implementation = NAME
