"""Windows of source text with records: a name and its value, which a later line asks for by the name.

A record is a line of a marker, a name and some words, the value. All are words that the rest of the window does not
have, so a model can only know a value from the line that defined it. Values have different lengths, and texts of any
length stand between records, so no value stands at a distance that a model could learn.
"""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

MARKER = "\n#:"
LONGEST, VALUE = 6, 4  # words of the longest value in the training, and of the values that are measured
WORDS, MOST = 320, 24  # different words in records, and records in a window
OCCURRENCES = (2, 4)  # of a record in a window
AT_LINE_ENDS = 0.5  # the share of windows with records between lines of the text; those of others stand anywhere
FAR, EDGE = 0.5, 0.15  # the share of windows that define in their first tokens and ask in their last, and how many
ASKED_WEIGHT = 4.0  # of the words that can be known, in the loss


class Lookups:
    """Draws windows of a stream of tokens, with records in them.

    Args:
        stream: The tokens of the text.
        tokenizer: Its lower-case words of one token are names and values.
        seed: Of the random choices.
    """

    def __init__(self, stream: np.ndarray, tokenizer: Tokenizer, seed: int) -> None:
        self.stream = stream
        self.marker = np.array(tokenizer.encode(MARKER).ids)
        (self.newline,) = tokenizer.encode("\n").ids
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
        whole = [token for token, text in texts.items() if text[:1] == " " and text[1:].isalpha() and text.islower()]
        words = np.array([token for token in whole if tokenizer.encode(texts[token]).ids == [token]])
        self.words = words[-WORDS:]  # The rarest: byte-pair encoding numbers its merges by their frequency.
        self.random = np.random.default_rng(seed)

    def records(self, text: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """Return records, with values of these lengths, whose words a text does not have."""
        words = self.random.permutation(np.setdiff1d(self.words, text))
        parts = np.split(words, np.cumsum(1 + lengths))[: len(lengths)]
        return [np.concatenate([self.marker, part]) for part in parts]

    def events(self, count: int, most: int) -> np.ndarray:
        """Return which record stands where: the places, from 0 to 1, and numbers of at most so many, sorted."""
        numbers = np.repeat(np.arange(count), self.random.integers(OCCURRENCES[0], OCCURRENCES[1] + 1, count))
        places = self.random.random(len(numbers))
        if self.random.random() < FAR:
            first = np.unique(numbers, return_index=True)[1]
            places = 1 - EDGE * places
            places[first] = EDGE * self.random.random(count)
        kept = np.sort(self.random.permutation(len(numbers))[:most])
        return np.stack([places[kept], numbers[kept]], 1)[np.argsort(places[kept])]

    def draw(self, window: int, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a window and the next one, and each token's weight in the loss.

        Args:
            window: The number of tokens that a model reads.
            share: The most of them that are in records.
        """
        length, start = window + 1, int(self.random.integers(len(self.stream) - 2 * window))
        text, head = self.stream[start : start + length], len(self.marker) + 1
        most = min(int(share * window / (head + (1 + LONGEST) / 2)), OCCURRENCES[1] * MOST)
        count = min(MOST, most // OCCURRENCES[0])
        count = int(self.random.integers(1 + count // 2, 2 + count))
        records = self.records(text, self.random.integers(1, LONGEST + 1, count))
        events = self.events(count, most)
        numbers = events[:, 1].astype(int).tolist()
        cuts = (events[:, 0] * max(0, length - sum(len(records[number]) for number in numbers))).astype(int)
        if self.random.random() < AT_LINE_ENDS:
            ends = np.append(np.flatnonzero(text == self.newline), len(text))
            cuts = ends[np.searchsorted(ends, cuts)]
        parts, weights, seen, before = [], [], set[int](), 0
        for cut, number in zip(cuts.tolist(), numbers, strict=True):
            weight = np.zeros(len(records[number]), np.float32)
            weight[head:] = ASKED_WEIGHT if number in seen else 0.0
            parts += [text[before:cut], records[number]]
            weights += [np.ones(cut - before, np.float32), weight]
            seen.add(number)
            before = cut
        parts.append(text[before:])
        weights.append(np.ones(len(text) - before, np.float32))
        return np.concatenate(parts)[:length], np.concatenate(weights)[:length]

    def batch(self, rows: int, window: int, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs, targets, and weights of the targets of some windows, (rows, window) each."""
        tokens, weights = (
            np.stack(parts) for parts in zip(*(self.draw(window, share) for _ in range(rows)), strict=True)
        )
        ids = torch.from_numpy(tokens.astype(np.int64))
        return ids[:, :-1], ids[:, 1:], torch.from_numpy(weights)[:, 1:]

    def asked(self, text: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a text behind definitions and before the same records in another order, and those records.

        Returns:
            The tokens, and the last records, (count, marker and words).
        """
        records = np.stack(self.records(text, np.full(count, VALUE)))
        again = records[self.random.permutation(count)]
        return np.concatenate([records.reshape(-1), text, again.reshape(-1)]), again
