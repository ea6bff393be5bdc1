"""Changes of logits before a token is selected: penalties of tokens that a text has, and masks of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hal.errors import OperationError
from hal.ops.declaration.constraints import Draw, Sample
from hal.ops.declaration.dtypes import FLOATING
from hal.ops.declaration.operation import op

WORD = 32
"""Number of tokens in one word of a mask."""


def _penalize_samples(draw: Draw) -> Iterator[Sample]:
    def column(*values: float) -> Tensor:
        return draw.tensor(values, torch.float32)

    for vocabulary in (5, 300):
        logits = draw.normal(4, vocabulary, scale=3.0)
        logits[:, 0], logits[:, 1] = -0.0, 0.0
        # Half of the tokens were not generated.
        counts = (draw.integers(0, 8, 4, vocabulary) - 4).clamp(min=0).to(torch.int32)
        prompted = draw.integers(0, 2, 4, vocabulary).bool()
        penalties = column(1.0, 1.3, 0.8, 2.0), column(0.0, 0.5, -0.7, 2.0), column(0.0, 1.5, -2.0, 0.25)
        yield (logits, counts, prompted, *penalties)
        yield (logits, torch.zeros_like(counts), torch.zeros_like(prompted), *penalties)
    yield (logits[:1], counts[:1] * 1000, ~prompted[:1], column(1.1), column(0.1), column(0.0))


@op(
    samples=_penalize_samples,
    axes={
        "logits": "rows vocab_size",
        "counts": "rows vocab_size",
        "prompted": "rows vocab_size",
        "repetition_penalty": "rows",
        "frequency_penalty": "rows",
        "presence_penalty": "rows",
        "return": "rows vocab_size",
    },
    dtypes={
        "logits": FLOATING,
        "counts": torch.int32,
        "prompted": torch.bool,
        "repetition_penalty": torch.float32,
        "frequency_penalty": torch.float32,
        "presence_penalty": torch.float32,
        "return": torch.float32,
    },
    rowwise="rows",
    tolerance={torch.bfloat16: (1e-5, 1e-5), torch.float16: (1e-5, 1e-5)},
)
def penalize(
    logits: Tensor,
    counts: Tensor,
    prompted: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
) -> Tensor:
    """Lower the logits of tokens that a text has already.

    The penalties apply in this order. The repetition penalty applies to the tokens of the prompt and to generated ones:
    it divides a positive logit, and multiplies another. The frequency penalty is subtracted once for each time that a
    token was generated. The presence penalty is subtracted once if it was generated. All is computed in float32. A row
    with the penalties 1, 0 and 0 keeps its values.

    Args:
        logits: ``[rows, vocab_size]``, floating.
        counts: ``[rows, vocab_size]``, int32: how often each token was generated, 0 or more.
        prompted: ``[rows, vocab_size]``, bool: whether the prompt has each token.
        repetition_penalty: ``[rows]``, float32, above 0; 1 changes nothing.
        frequency_penalty: ``[rows]``, float32; 0 changes nothing.
        presence_penalty: ``[rows]``, float32; 0 changes nothing.

    Returns:
        ``[rows, vocab_size]``, float32.

    Source: Keskar et al., *CTRL: A Conditional Transformer Language Model for Controllable Generation*, 2019
    (repetition, extended to negative logits as in vLLM and transformers); OpenAI's API reference (frequency, presence).
    """
    wide, generated = logits.float(), counts > 0
    repetition = repetition_penalty[:, None]
    repeated = torch.where(wide > 0, wide / repetition, wide * repetition)
    penalized = torch.where(prompted | generated, repeated, wide)
    penalized = penalized - frequency_penalty[:, None] * counts.float()
    return penalized - presence_penalty[:, None] * generated.float()


def _mask_samples(draw: Draw) -> Iterator[Sample]:
    for rows, vocabulary in ((1, 1), (3, 32), (5, 100), (2, 500)):
        logits = draw.normal(rows, vocabulary)
        logits[:, 0] = -0.0
        allowed = draw.integers(-(2**31), 2**31, rows, -(-vocabulary // WORD), dtype=torch.int32)
        yield logits, allowed
        yield logits, torch.full_like(allowed, -1)
        one = torch.zeros_like(allowed)
        one[:, -1] = 1 << (vocabulary - 1) % WORD if vocabulary % WORD else -(2**31)  # the last token
        yield logits, one
    yield logits, torch.zeros_like(allowed)


@op(
    samples=_mask_samples,
    axes={"logits": "rows vocab_size", "allowed": "rows words", "return": "rows vocab_size"},
    dtypes={"logits": FLOATING, "allowed": torch.int32, "return": "logits"},
    rowwise="rows",
    tolerance=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), (0.0, 0.0)),
)
def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Replace the logits of tokens that are not allowed by negative infinity. Others keep their values.

    ``allowed`` is a bit mask, in the format of the token bit masks of XGrammar and llguidance: token ``t`` is bit
    ``t % 32`` of word ``t // 32``, where bit 0 is the lowest. Bits after the vocabulary are ignored.

    Args:
        logits: ``[rows, vocab_size]``, floating.
        allowed: ``[rows, words]``, int32, where words is ``vocab_size / 32``, rounded up. A word of -1 allows its 32
            tokens.

    Returns:
        ``[rows, vocab_size]``, of the dtype of ``logits``, in memory of its own.

    Raises:
        OperationError: ``allowed`` has another number of words.

    Source: XGrammar's documentation of ``allocate_token_bitmask``.
    """
    vocabulary = logits.shape[-1]
    check_words(vocabulary, allowed.shape[-1])
    bits = torch.arange(WORD, dtype=torch.int32, device=allowed.device)
    banned = (allowed[:, :, None] >> bits & 1) == 0
    return logits.masked_fill(banned.flatten(1)[:, :vocabulary], float("-inf"))


def check_words(vocab_size: int, words: int) -> None:
    """Check the width of a mask, as kernels of :func:`mask_logits` do.

    Raises:
        OperationError: a mask of ``vocab_size`` tokens has another number of words.
    """
    if words != -(-vocab_size // WORD):
        raise OperationError(
            f"mask_logits was given {words} words for a vocabulary of {vocab_size} tokens",
            f"give {-(-vocab_size // WORD)} words of int32: one for each {WORD} tokens of the model's vocab_size",
        )
