"""The interface of encoders, which turn inputs beside the tokens, such as images, into embeddings, and their places."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from hal.errors import BatchError
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


@attrs.frozen(eq=False)
class AxisPlacement(Placement):
    """A placement with positions along three axes.

    Attributes:
        axis_positions: ``[3, tokens]``, int64: those of the prompt's tokens.
    """

    axis_positions: Tensor

    def fields(self, start: int, stop: int) -> Mapping[str, Tensor]:
        known = self.axis_positions.shape[1]
        prompt = self.axis_positions[:, start : min(stop, known)]
        if stop <= known:
            return {"axis_positions": prompt}
        # Text after the prompt goes on behind the largest position.
        behind = int(self.axis_positions.max()) + 1 - known
        return {"axis_positions": torch.cat((prompt, torch.arange(max(start, known), stop).expand(3, -1) + behind), 1)}


@attrs.frozen
class Block:
    """Consecutive placeholders: a whole image, a whole video, or a frame of it.

    Attributes:
        kind: ``image`` or ``video``.
        grid: the numbers of embeddings along time, height and width.
        step: the distance of two positions along time.
    """

    kind: str
    grid: tuple[int, int, int]
    step: float = 1.0

    @property
    def size(self) -> int:
        """The number of placeholders."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def positions(self, base: int) -> Tensor:
        """Return the positions of its tokens, ``[3, size]``, for a block that begins at the position ``base``."""
        time, height, width = map(torch.arange, self.grid)
        axes = torch.meshgrid((time * self.step).long(), height, width, indexing="ij")
        return torch.stack([each.flatten() for each in axes]) + base


def place_blocks(tokens: Sequence[int], blocks: Sequence[Block], placeholders: Mapping[int, str]) -> AxisPlacement:
    """Return where the embeddings of blocks go in a prompt, and the positions of its tokens.

    Text counts from the largest position before it. A block begins at the next position ``p``: row ``r`` and column
    ``c`` of it are at ``p + r`` and ``p + c``, and the text behind it begins at ``p`` plus the larger of its height and
    width.

    Args:
        tokens: the prompt.
        blocks: in the order of the placeholders.
        placeholders: the kinds of the items, by their placeholder's token.

    Raises:
        BatchError: the placeholders are not those of the blocks.
    """
    holds = torch.isin(torch.tensor(tokens, dtype=torch.int64), torch.tensor([*placeholders], dtype=torch.int64))
    rows = torch.where(holds, holds.cumsum(0) - 1, -1)
    positions, at, base = torch.empty(3, len(tokens), dtype=torch.int64), 0, 0
    places = holds.nonzero().flatten().tolist()
    taken = 0
    for index, block in enumerate(blocks):
        start = places[taken] if taken < len(places) else len(tokens)
        found = tokens[start : start + block.size]
        if len(found) < block.size or any(placeholders.get(each) != block.kind for each in found):
            raise BatchError(
                f"the prompt has no {block.size} placeholders in a row for {block.kind} {index} of {len(blocks)}",
                "give as many images and videos as the prompt has placeholders of, in the same order",
            )
        positions[:, at:start] = torch.arange(start - at) + base
        base += start - at
        at = start + block.size
        positions[:, start:at] = block.positions(base)
        base += max(block.grid[1:])
        taken += block.size
    if taken < len(places):
        raise BatchError(
            f"the prompt has placeholders for images or videos from token {places[taken]} on, and no more are given",
            "give as many images and videos as the prompt has placeholders of",
        )
    positions[:, at:] = torch.arange(len(tokens) - at) + base
    return AxisPlacement(rows, positions)


def expanded(
    tokens: Sequence[int], kinds: Sequence[str], parts: Sequence[Sequence[int]], placeholders: Mapping[int, str]
) -> list[int]:
    """Return a prompt in which each placeholder is replaced.

    Args:
        tokens: the prompt, with one placeholder for each item.
        kinds: the kind of each item.
        parts: the tokens that replace the placeholder of each item.
        placeholders: the kinds of the items, by their placeholder's token.

    Raises:
        BatchError: there are more or fewer placeholders than items, or those of another kind.
    """
    found, taken = list[int](), [placeholders[each] for each in tokens if each in placeholders]
    if taken != list(kinds):
        raise BatchError(
            f"the prompt has placeholders for {len(taken)} images or videos, and {len(kinds)} are given",
            "give as many as the prompt has placeholders of, in the same order",
        )
    replacing = iter(parts)
    for each in tokens:
        found += next(replacing) if each in placeholders else [each]
    return found


def merged(item: EncoderItem, merge: int) -> tuple[int, int, int]:
    """Return the numbers of an item's embeddings along time, height and width."""
    time, height, width = item.grid
    return time, height // merge, width // merge


def check_items(items: Sequence[EncoderItem], features: int, merge: int) -> None:
    """Raise BatchError unless the items have whole blocks of patches with so many features."""
    for index, each in enumerate(items):
        time, height, width = each.grid
        patches = time * height * width
        if each.kind not in (IMAGE, VIDEO) or min(each.grid) < 1 or height % merge or width % merge:
            raise BatchError(
                f"item {index} is a {each.kind} of {each.grid} patches; height and width are multiples of {merge}",
                "prepare it with the checkpoint's processor",
            )
        if tuple(each.values.shape) != (patches, features):
            raise BatchError(
                f"item {index} has values {list(each.values.shape)}, not {[patches, features]}",
                "prepare it with the checkpoint's processor",
            )


def frames(items: Sequence[EncoderItem], merge: int) -> Iterator[Block]:
    """Yield a block for each image and for each frame of a video."""
    for each in items:
        time, height, width = merged(each, merge)
        for _ in range(time):
            yield Block(each.kind, (1, height, width))
