"""The masks of a step's sequences: which tokens each may take next."""

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


def allowed_tokens(
    prompts: Sequence[int],
    masks: Sequence[Mask | None],
    generated: Sequence[Sequence[int]],
    vocab_size: int,
) -> Tensor:
    """Return the masks of a step, as :func:`hal.ops.mask_logits` takes them.

    Args:
        prompts: the index of each row's prompt, for errors.
        masks: the mask of each row. A row without one may take all tokens.
        generated: the tokens generated so far for each row.
        vocab_size: the number of tokens of the model.

    Returns:
        ``[batch, words]``, int32, on the CPU.

    Raises:
        ConfigError: a mask is not an int32 tensor ``[words]`` on the CPU, or allows no token.
    """
    words = -(-vocab_size // WORD)
    allowed = torch.full((len(masks), words), ALL, dtype=torch.int32)
    for row, (prompt, mask, tokens) in enumerate(zip(prompts, masks, generated, strict=True)):
        if mask is not None:
            allowed[row] = _checked(mask(tokens), words, prompt)
    # Bits after the vocabulary do not count.
    last = allowed[:, -1:] & torch.tensor((1 << (vocab_size - 1) % WORD + 1) - 1).to(torch.int32)
    stuck = ~torch.cat((allowed[:, :-1], last), dim=1).any(-1)
    if stuck.any():
        row = int(stuck.nonzero()[0])
        raise ConfigError(
            f"the mask of prompt {prompts[row]} allows no token after {len(generated[row])} new tokens",
            "let the mask allow a stop token where the text may end, and give it in stop_token_ids",
        )
    return allowed


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
