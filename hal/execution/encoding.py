"""The cache of an encoder's results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from hal.drivers.backend import Backend
from hal.drivers.compiler import Outputs
from hal.errors import ModelError
from hal.nn import Encoder, EncoderItem
from hal.step import EncoderBatch


def most_tokens(encoder: Encoder, backend: Backend) -> int:
    """Return the most tokens of an encoder's step, those of ``max_prefill_tokens`` rows. One item may have more."""
    return encoder.row_tokens * backend.config.max_prefill_tokens


class Encoding:
    """Encodes the items of prompts, and keeps the results of the most recent ones.

    Args:
        encoder: a module of a model that is loaded on the backend.
        backend: has the encoder's weights.
        run: runs a step of the encoder. What it returns is valid until the next one.

    Attributes:
        steps: the steps so far.
    """

    def __init__(self, encoder: Encoder, backend: Backend, run: Callable[[EncoderBatch], Outputs]) -> None:
        self._encoder, self._backend, self._run = encoder, backend, run
        self._budget = backend.config.cache.num_embeddings
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # the least recently used first
        self._rows = 0
        self.steps = 0

    def encode(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        """Return the embeddings of each item, ``[rows, width]``, on the device. Those in the cache are not computed.

        Raises:
            BatchError: an item does not fit the encoder.
            ModelError: the encoder returned tensors of other shapes.
        """
        missing = {each.digest: each for each in items if each.digest not in self._kept}
        found = {each.digest: self._kept[each.digest] for each in items if each.digest not in missing}
        for group in _groups(list(missing.values()), most_tokens(self._encoder, self._backend)):
            found |= {each.digest: made for each, made in zip(group, self._encode(group), strict=True)}
        for digest, embeddings in found.items():
            self._keep(digest, embeddings)
        return [found[each.digest] for each in items]

    def clear(self) -> None:
        """Forget all results, which other weights computed."""
        self._kept.clear()
        self._rows = 0

    def _encode(self, items: list[EncoderItem]) -> list[Tensor]:
        batch = self._encoder.batch(items).to(self._backend.device.torch)
        (embeddings,) = self._run(batch)
        self.steps += 1
        wanted = sum(map(self._encoder.rows, items))
        if embeddings.dim() != 2 or embeddings.shape[0] < wanted:
            raise ModelError(
                f"{type(self._encoder).__name__}.forward returned {list(embeddings.shape)}, not [{wanted}, width]",
                "return a row for every `row_tokens` tokens",
            )
        return [each.clone() for each in self._encoder.per_item(items, embeddings)]

    def _keep(self, digest: bytes, embeddings: Tensor) -> None:
        rows = embeddings.shape[0]
        if digest in self._kept:
            self._kept.move_to_end(digest)
        elif rows <= self._budget:
            self._kept[digest] = embeddings
            self._rows += rows
        while self._rows > self._budget:
            _, dropped = self._kept.popitem(last=False)
            self._rows -= dropped.shape[0]


def _groups(items: list[EncoderItem], most: int) -> Iterator[list[EncoderItem]]:
    """Yield the items in groups of at most so many tokens, or single ones."""
    group: list[EncoderItem] = []
    tokens = 0
    for each in items:
        count = each.values.shape[0]
        if group and tokens + count > most:
            yield group
            group, tokens = [], 0
        group.append(each)
        tokens += count
    if group:
        yield group
