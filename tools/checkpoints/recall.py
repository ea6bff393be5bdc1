"""Windows of source text in which a name of random words is repeated, which a model can know only from memory."""

from __future__ import annotations

import math

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

MARKER, WORDS = "\n# name:", 8
NAMED_SHARE = 0.6  # of the windows
AT_LINE_ENDS = 0.7  # of the names; the others stand anywhere
REPEATED_WEIGHT = 4.0  # of the words that can be known, in the loss
SHORTEST, FIRST_LONGEST = 4, 48  # tokens between a name and the next; the longest distance grows to the window's
GROWN_AT = 0.4  # the progress from which names are up to a window apart


class Names:
    """Names of random words, each word one token, behind a marker."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.marker = np.array(tokenizer.encode(MARKER).ids)
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
        whole = [token for token, text in texts.items() if text[:1] == " " and text[1:].isalpha() and text.islower()]
        self.words = np.array([token for token in whole if tokenizer.encode(texts[token]).ids == [token]])
        self.generator = np.random.default_rng(seed)

    def draw(self) -> np.ndarray:
        """Return a name behind its marker."""
        return np.concatenate([self.marker, self.generator.choice(self.words, WORDS)])


class Windows:
    """Random windows of a stream of tokens.

    Args:
        stream: The tokens.
        names: Draws the names.
        newline: The token of a line's end.
        window: The number of tokens that a model reads.
    """

    def __init__(self, stream: np.ndarray, names: Names, newline: int, window: int) -> None:
        self.stream, self.names, self.window = stream, names, window
        self.random = names.generator
        self.line_ends = np.flatnonzero(stream == newline)

    def text(self, start: int, length: int) -> np.ndarray:
        """Return about so many tokens of the stream: up to a line's end, most times."""
        if self.random.random() < AT_LINE_ENDS and length > 0:
            end = self.line_ends[min(np.searchsorted(self.line_ends, start + length), len(self.line_ends) - 1)]
            length = int(end) - start
        return self.stream[start : start + max(0, length)]

    def gap(self, first: bool, progress: float) -> int:
        """Return the distance from a name to the next."""
        longest = FIRST_LONGEST * (self.window / FIRST_LONGEST) ** min(1.0, progress / GROWN_AT)
        if first and self.random.random() < 0.5:
            return int(self.random.uniform(longest / 3, longest))
        return int(math.exp(self.random.uniform(math.log(SHORTEST), math.log(longest))))

    def draw(self, progress: float) -> tuple[np.ndarray, np.ndarray]:
        """Return a window's tokens and the next one, and each token's weight in the loss.

        Args:
            progress: The share of the training that is done. Names get further apart.
        """
        length = self.window + 1
        start = int(self.random.integers(len(self.stream) - 2 * length))
        weights = np.ones(length, np.float32)
        if self.random.random() > NAMED_SHARE:
            return self.stream[start : start + length], weights
        name = self.names.draw()
        lead = 0 if self.random.random() < 0.3 else int(self.random.integers(length // 4))
        parts, at, number = [self.text(start, lead)], 0, 0
        while at < length:
            text = parts[-1]
            start, at = start + len(text), at + len(text)
            end = at + len(name)
            weights[at:end] = 0.0
            weights[at + len(self.names.marker) : end] = REPEATED_WEIGHT if number else 0.0
            weights[end : end + 1] = 0.0
            gap = self.gap(number == 0, progress)
            if number == 0:  # leave room for another
                gap = min(gap, max(0, length - end - 3 * len(name)))
            parts += [name, self.text(start, gap)]
            at, number = end, number + 1
        return np.concatenate(parts)[:length], weights

    def batch(self, rows: int, progress: float) -> tuple[Tensor, ...]:
        """Return the inputs, targets, and weights of the targets of some windows."""
        tokens, weights = (np.stack(parts) for parts in zip(*(self.draw(progress) for _ in range(rows)), strict=True))
        ids = torch.from_numpy(tokens.astype(np.int64))
        return tuple(part.contiguous() for part in (ids[:, :-1], ids[:, 1:], torch.from_numpy(weights)[:, 1:]))
