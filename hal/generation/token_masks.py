"""The mask of a sequence: which tokens it may take next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hal.errors import ConfigError
from hal.generation.sampling_params import Mask
from hal.ops.logits import WORD

ALL = -1
"""A word that allows all its tokens."""


def allowed_tokens(prompt: int, mask: Mask, generated: Sequence[int], vocab_size: int) -> Tensor:
    """Return what a mask allows, as a row of ``allowed`` of :func:`hal.ops.mask_logits`.

    Args:
        prompt: the index of the prompt, for errors.
        mask: the mask.
        generated: the tokens generated so far.
        vocab_size: the number of tokens of the model.

    Returns:
        ``[words]``, int32, on the CPU.

    Raises:
        ConfigError: the mask is not an int32 tensor ``[words]`` on the CPU, or allows no token.
    """
    allowed = _checked(mask(generated), -(-vocab_size // WORD), prompt)
    # Bits after the vocabulary do not count.
    last = int(allowed[-1]) & ((1 << (vocab_size - 1) % WORD + 1) - 1)
    if not last and not allowed[:-1].any():
        raise ConfigError(
            f"the mask of prompt {prompt} allows no token after {len(generated)} new tokens",
            "let the mask allow a stop token where the text may end, and give it in stop_token_ids",
        )
    return allowed


def all_tokens(vocab_size: int) -> Tensor:
    """Return the mask that allows all tokens, ``[words]``."""
    return torch.full((-(-vocab_size // WORD),), ALL, dtype=torch.int32)


def _checked(found: Any, words: int, prompt: int) -> Tensor:
    if isinstance(found, Tensor) and found.shape == (words,) and found.dtype is torch.int32 and found.is_cpu:
        return found
    if isinstance(found, Tensor):
        shown = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)} on {found.device}"
    else:
        shown = f"{found!r:.70}"
    raise ConfigError(
        f"the mask of prompt {prompt} returned {shown}",
        f"return int32[{words}] on cpu: one bit for each token of the model's vocab_size, as in hal.ops.mask_logits",
    )
