"""What a prompt asks of sampling, and a step's logits turned into tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from hal import ops
from hal.errors import ConfigError


def _token_ids(values: Iterable[int]) -> frozenset[int]:
    try:
        return frozenset(map(operator.index, values))
    except TypeError:
        raise ConfigError(f"stop_token_ids is {values!r:.70}", "give token ids, such as {0}") from None


@attrs.frozen
class SamplingParams:
    """How the tokens of one prompt are chosen; see :func:`hal.ops.sample`.

    Attributes:
        max_new_tokens: at most so many; 1 or more.
        temperature: 0 or more, and finite; 0 takes the likeliest token each time.
        top_k: keep only so many of the likeliest; from 0, which keeps all, to 2**31 - 1.
        top_p: keep the likeliest that together reach this probability; more than 0, and at most 1, which keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; from 0, which keeps all, to 1.
        seed: of this prompt alone, from 0 to 2**63 - 1; the same seed gives the same tokens in any batch.
        stop_token_ids: tokens that end the text. They are reported, as the last token.

    Raises:
        ConfigError: one is of another type, or out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = attrs.field(default=frozenset(), converter=_token_ids)

    def __attrs_post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            if type(getattr(self, name)) is not int:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, not an integer", "see hal.SamplingParams")
        for name in ("temperature", "top_p", "min_p"):
            if type(getattr(self, name)) not in (int, float):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, not a number", "see hal.SamplingParams")
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < float("inf"), "0 or more, and finite"),
            "top_k": (0 <= self.top_k < 2**31, "0, which keeps all, to 2**31 - 1"),
            "top_p": (0 < self.top_p <= 1, "more than 0, and at most 1, which keeps all"),
            "min_p": (0 <= self.min_p <= 1, "0, which keeps all, to 1"),
            "seed": (0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        }
        for name, (fits, wanted) in ranges.items():
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)}, out of its range", f"give {wanted}")


def choose(logits: Tensor, params: Sequence[SamplingParams], drawn: Sequence[int]) -> Tensor:
    """The next token of each row.

    Args:
        logits: ``[batch, vocab_size]``, floating, free of NaN.
        params: one for each row.
        drawn: how many tokens each row's prompt has been given before: its place in the seed's sequence.

    Returns:
        ``[batch]``, int64, on the logits' device.
    """
    if all(each.temperature == 0 for each in params):
        return ops.greedy_sample(logits)

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device)

    return ops.sample(
        logits,
        column([each.temperature for each in params], torch.float32),
        column([each.top_k for each in params], torch.int32),
        column([each.top_p for each in params], torch.float32),
        column([each.min_p for each in params], torch.float32),
        column([each.seed for each in params], torch.int64),
        column(list(drawn), torch.int64),
    )


def rows_of_nan(logits: Tensor) -> list[int]:
    """The rows of ``[batch, vocab_size]`` that hold a NaN. Waits for the device."""
    bad = logits.amax(-1).isnan()
    return bad.nonzero().flatten().tolist() if bad.any() else []
