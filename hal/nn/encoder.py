"""The interface of encoders, which turn inputs beside the tokens, such as images, into embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from hal.step.model_batches import EncoderBatch

IMAGE, VIDEO = "image", "video"
"""The kinds of items."""


@attrs.frozen(eq=False)
class EncoderItem:
    """An input of an encoder, as a processor prepares it, such as one image.

    Attributes:
        kind: ``image`` or ``video``.
        values: ``[tokens, features]``, float32, on the CPU: the encoder's tokens, such as patches.
        grid: the numbers of tokens along time, height and width, whose product is ``tokens``.
        digest: the hash of its content. Items with equal digests have equal embeddings.
        seconds: the time between two steps along the first axis; None if unknown.
        times: the time of each step along the first axis, in seconds; None if unknown. Some models' prompts tell it.
    """

    kind: str
    values: Tensor
    grid: tuple[int, int, int]
    digest: bytes
    seconds: float | None = None
    times: tuple[float, ...] | None = None


@attrs.frozen(eq=False)
class Placement:
    """Where the embeddings of a prompt's items go. A model with further fields derives from it.

    Attributes:
        rows: ``[tokens]``, int64: for each token of the prompt, the row of its embedding among those of all items, in
            the order of the items; -1 for a token of text.
    """

    rows: Tensor

    def fields(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Return further fields of the batch for the tokens ``start`` to ``stop`` of the sequence, on the CPU.

        Args:
            start: the first token.
            stop: the end, which may be behind the prompt.
        """
        return {}


class Encoder(nn.Module):
    """Base of encoders. A model that has one names it in ``CausalLM.encoder``.

    Attributes:
        batch_type: the class of its batches.
        row_tokens: the number of its tokens for each row of embeddings.
    """

    batch_type: type[EncoderBatch] = EncoderBatch
    row_tokens: int = 1

    def check(self, items: Sequence[EncoderItem]) -> None:
        """Raise BatchError unless the encoder can encode the items."""

    @abstractmethod
    def example(self, tokens: int) -> EncoderItem:
        """Return an item of about so many tokens, at least one row, to measure the memory of a step."""

    @abstractmethod
    def batch(self, items: Sequence[EncoderItem]) -> EncoderBatch:
        """Return the batch of items that :meth:`check` accepts, on the CPU."""

    @abstractmethod
    def forward(self, batch: Any) -> Tensor:
        """Encode the items of a batch.

        Args:
            batch: of the class ``batch_type``. It may have padding tokens at its end.

        Returns:
            Embeddings ``[tokens / row_tokens, width]``.
        """

    def rows(self, item: EncoderItem) -> int:
        """Return the number of an item's embeddings."""
        return item.values.shape[0] // self.row_tokens

    def most_sequences(self, tokens: int) -> int:
        """Return the number of sequences, such as frames, that a graph of so many tokens holds. Others run uncaptured.

        The default is one for 64 tokens, and at least 16.
        """
        return max(16, tokens // 64)

    def per_item(self, items: Sequence[EncoderItem], embeddings: Tensor) -> list[Tensor]:
        """Return the embeddings of each item, ``[rows, width]``, in the order of its tokens.

        Args:
            items: the items of the batch.
            embeddings: what :meth:`forward` returned; it may have padding rows at its end.
        """
        sizes = [self.rows(each) for each in items]
        return list(torch.split(embeddings[: sum(sizes)], sizes))

    if TYPE_CHECKING:
        __call__ = forward
