"""The inputs of a prompt beside its tokens, such as images, on their way into the steps of its request."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hal.device.device import to_device
from hal.execution.runner import Runner
from hal.nn import EncoderItem, Placement
from hal.step.batch import Batch
from hal.step.fields import fields_of
from hal.step.padding import padding_batch


@attrs.define(eq=False)
class PromptInputs:
    """The items of a prompt, and where their embeddings go.

    Attributes:
        items: the items, in the order of their placeholders.
        placement: the rows of their embeddings for each token.
        starts: the row of each item's first embedding, then the number of rows.
    """

    items: tuple[EncoderItem, ...]
    placement: Placement
    starts: tuple[int, ...]
    _embeddings: Tensor | None = None
    _first: int = 0  # the row of the first embedding in _embeddings

    @classmethod
    def of(cls, runner: Runner, tokens: Sequence[int], items: Sequence[EncoderItem]) -> PromptInputs | None:
        """Return the inputs of a prompt; None without items.

        Raises:
            BatchError: the placeholders in the prompt are not those of the items.
            ModelError: the model reads text alone.
        """
        encoder = runner.model.encoder
        if encoder is None and not items:
            return None
        if encoder is not None:
            encoder.check(items)
        placement = runner.model.place(tokens, items)
        if encoder is None or not items:
            return None
        return cls(tuple(items), placement, (0, *accumulate(map(encoder.rows, items))))

    def identities(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a sequence, in which placeholders differ by the content of their items.

        Prompts share a prefix of the cache only where these are equal.
        """
        of_row: list[int] = []
        for item, (start, end) in zip(self.items, pairwise(self.starts), strict=True):
            base = int.from_bytes(hashlib.sha256(item.digest).digest()[:7], "big") + 1  # Rows fit behind it in 64 bits.
            of_row += range(-base, -base - (end - start), -1)
        rows = self.placement.rows.tolist()
        known = [token if row < 0 else of_row[row] for token, row in zip(tokens, rows, strict=False)]
        return [*known, *tokens[len(rows) :]]

    def needed(self, start: int, stop: int) -> Sequence[EncoderItem]:
        """Return the items of which a token is among those from ``start`` to ``stop``."""
        rows = self.placement.rows[start:stop]
        rows = rows[rows >= 0]
        if not rows.numel():
            return ()
        first, last = (bisect_right(self.starts, int(each)) - 1 for each in (rows.min(), rows.max()))
        self._first = self.starts[first]
        return self.items[first : last + 1]

    def give(self, embeddings: Sequence[Tensor]) -> None:
        """Take the embeddings of the items that :meth:`needed` returned."""
        self._embeddings = torch.cat(list(embeddings)) if embeddings else None

    def drop(self) -> None:
        """Forget the embeddings, which are in the model's cache as keys and values."""
        self._embeddings = None

    def fields(self, start: int, stop: int) -> Mapping[str, Tensor]:
        """Return the fields of the batch for the tokens ``start`` to ``stop`` of the sequence."""
        found = dict(self.placement.fields(start, stop))
        if self._embeddings is not None:
            rows = self.placement.rows[start:stop]
            rows = functional.pad(rows, (0, stop - start - rows.shape[0]), value=-1)
            embedded, device = rows >= 0, self._embeddings.device
            # One copy of the embeddings, which are much memory; then zeros for text, to which layers add them.
            whole = self._embeddings.index_select(0, (rows - self._first).clamp(min=0).to(device))
            texts = (~embedded).nonzero().flatten().to(device)
            whole.index_copy_(0, texts, whole.new_zeros(texts.shape[0], whole.shape[1]))
            found |= {"embedded": embedded, "embeddings": whole}
        return found


def step_fields(
    runner: Runner, inputs: Sequence[PromptInputs | None], starts: Sequence[int], counts: Sequence[int]
) -> dict[str, Tensor]:
    """Return the fields of a step's batch that the inputs of its prompts determine. Encodes the items that it reads.

    Args:
        runner: encodes the items, or has kept their embeddings.
        inputs: those of each sequence; None for text alone.
        starts: the first token of each sequence in the step.
        counts: the number of its tokens in the step.

    Raises:
        ModelError: the encoder returned tensors of other shapes.
        ClosedError: the runner is closed.
    """
    if all(each is None for each in inputs):
        return {}
    ranges = [(start, start + count) for start, count in zip(starts, counts, strict=True)]
    needed = [(each, each.needed(*span)) for each, span in zip(inputs, ranges, strict=True) if each is not None]
    items = [item for _, own in needed for item in own]
    found = iter(runner.encode(items) if items else ())
    with torch.inference_mode():
        for each, own in needed:
            each.give([next(found) for _ in own])
        parts = [{} if each is None else each.fields(*span) for each, span in zip(inputs, ranges, strict=True)]
        for each, _ in needed:
            each.drop()
        size, device = runner.spec.block_size, runner.backend.device.torch
        return joined_fields(runner.model.batch_type, parts, counts, starts, block_size=size, device=device)


def joined_fields(
    batch_type: type[Batch],
    parts: Sequence[Mapping[str, Tensor]],
    counts: Sequence[int],
    cached: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return fields along the tokens of a batch, from those of its sequences.

    Args:
        parts: for each sequence, the fields of its new tokens by name, on the host or the device. A field that a
            sequence lacks has its default there.
        counts: the number of new tokens of each sequence.
        cached: the number of tokens before them.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    bases: dict[torch.device, Batch] = {}
    found = {}
    for name in names:
        declared = fields_of(batch_type)[name]
        place, dim = next(part[name].device for part in parts if name in part), declared.dim("tokens")
        assert declared.default is not None
        assert dim is not None
        if all(name in part for part in parts):
            whole = torch.cat([part[name] for part in parts], dim)
        else:
            if place not in bases:
                bases[place] = padding_batch(Batch, counts, block_size=block_size, device=place, cached=cached)
            whole, start = declared.default(bases[place]).to(declared.dtype).clone(), 0
            for part, count in zip(parts, counts, strict=True):
                if name in part:
                    whole.narrow(dim, start, count).copy_(part[name])
                start += count
        found[name] = whole if whole.device == device else to_device(whole, device)
    return found
