"""A batch: one step's tokens and where their keys and values live, as tensors.

The engine owns blocks and slots. It makes a batch with :meth:`Batch.build`, or from tensors that it has; the runner
takes it finished. A model that needs more declares a subclass, which the rest of hal pads, cuts and traces alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from hal.errors import BatchError, nearest
from hal.step.batch_inputs import Bounds, integers_of, length_of, tensor_of
from hal.step.fields import Padding, field, fields_of, host_twin
from hal.step.shape import StepShape

DUMMY_BLOCK = 0
"""The block that padding rows write to. No sequence may own it."""
DUMMY_SLOT = 0
"""The slot that padding rows write to. No sequence may own it."""


def _dummy_slots(padding: Padding) -> Tensor:
    offsets = torch.arange(padding.sizes["tokens"], dtype=torch.int32) % padding.block_size
    return DUMMY_BLOCK * padding.block_size + offsets


def _equal_starts(padding: Padding) -> Tensor:
    return torch.arange(padding.sizes["sequences"] + 1, dtype=torch.int32) * padding.queries


@attrs.frozen(eq=False)
class Batch:
    """What a model sees of one step. ``tokens`` counts the new tokens of all sequences, one sequence after the other.

    Attributes:
        token_ids: ``[tokens]``, int64.
        positions: ``[tokens]``, int64: each token's place in its sequence, from 0.
        slot_mapping: ``[tokens]``, int32: where each token's key and value go, ``block * block_size + offset``.
        block_table: ``[sequences, max_blocks]``, int32: the blocks of each sequence, in order; padded with 0.
        query_start_loc: ``[sequences + 1]``, int32: where each sequence's tokens begin; the last is ``tokens``.
        kv_lens: ``[sequences]``, int32: the length of each sequence, new tokens included.
        logits_indices: ``[rows]``, int64: the tokens whose logits are wanted; by default each sequence's last. They
            count from 0: steps are padded, so that a negative one would be a row of padding. A runner refuses others
            that lie in the CPU's memory. In a device's it does not look: the host would wait for the device each step.
        query_start_loc_host: the values of query_start_loc on the CPU.
        kv_lens_host: the values of kv_lens on the CPU.
    """

    token_ids: Tensor = field("tokens", torch.int64)
    positions: Tensor = field("tokens", torch.int64)
    slot_mapping: Tensor = field("tokens", torch.int32, pad=_dummy_slots)
    block_table: Tensor = field("sequences blocks", torch.int32)
    query_start_loc: Tensor = field("sequences+1", torch.int32, pad=_equal_starts, by_shape=True)
    kv_lens: Tensor = field("sequences", torch.int32)
    logits_indices: Tensor = field("rows", torch.int64)
    query_start_loc_host: Tensor = host_twin("query_start_loc")
    kv_lens_host: Tensor = host_twin("kv_lens")

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """Sequences in the batch."""
        return self.kv_lens.shape[0]

    @property
    def shape(self) -> StepShape:
        """The step's shape, from the values on the host."""
        return StepShape.of_starts(self.num_tokens, self.query_start_loc_host.tolist())

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes."""
        rows, blocks = self.logits_indices.shape[0], self.block_table.shape[1]
        return {"tokens": self.num_tokens, "sequences": self.num_sequences, "rows": rows, "blocks": blocks}

    def check(self) -> None:
        """Raise BatchError unless every tensor has the shape that its field declares.

        Kernels would read past the end of one that is too short. Which rows of logits are wanted is checked where the
        host has them. On a device they are not: to read them there is to wait for all work before, each step.
        """
        sizes = self.sizes
        for name, declared in fields_of(type(self)).items():
            found, wanted = tuple(getattr(self, name).shape), declared.shape(sizes)
            if found != wanted:
                raise BatchError(
                    f"the batch's {name} is {list(found)}, not {list(wanted)}, for {sizes['sequences']} sequences of "
                    f"{sizes['tokens']} tokens",
                    f"give it the shape {declared} that {type(self).__name__} declares",
                )
        if self.logits_indices.is_cpu:
            indices, tokens = self.logits_indices.tolist(), sizes["tokens"]  # a list is faster than torch for so few
            if indices and not (min(indices) >= 0 and max(indices) < tokens):
                wrong = next(each for each in indices if not 0 <= each < tokens)
                raise BatchError(
                    f"the batch's logits_indices has {wrong}, and the step's tokens are 0 to {tokens - 1}",
                    "count from 0; a negative index does not count from the end, as steps are padded there",
                )

    def tensors(self) -> list[Tensor]:
        """The tensors in the order of the fields: contiguous, and of the dtypes that they declare."""
        return [getattr(self, name).to(each.dtype).contiguous() for name, each in fields_of(type(self)).items()]

    def split(self, max_tokens: int) -> list[Self]:
        """The same work in steps of at most ``max_tokens`` tokens, to be run in this order.

        A sequence that a step leaves unfinished goes on in the next, with what is done so far in the cache. Each step
        asks for those logits of this batch that its tokens give; ``logits_indices`` must be sorted, from 0 or above.

        Raises:
            BatchError: ``max_tokens`` is less than 1, or no integer; or ``logits_indices`` are not sorted.
        """
        if type(max_tokens) is not int or max_tokens < 1:
            raise BatchError(f"steps of {max_tokens!r:.70} tokens were asked for", "ask for at least 1")
        if self.num_tokens <= max_tokens:
            return [self]
        wanted = self.logits_indices
        if bool((wanted.diff() < 0).any() or (wanted < 0).any()):
            raise BatchError(
                "logits_indices are negative or not sorted, and the batch takes several steps",
                "count from 0 and sort them",
            )
        return [self._between(start, start + max_tokens) for start in range(0, self.num_tokens, max_tokens)]

    def _between(self, start: int, end: int) -> Self:
        starts = self.query_start_loc_host.long()
        clipped = starts.clamp(start, end)
        rows = (clipped[1:] > clipped[:-1]).nonzero().flatten()
        first, last = int(rows[0]), int(rows[-1]) + 1
        # Of each sequence's length, what its tokens after this step will add is not there yet.
        lengths = (self.kv_lens_host - (starts[1:] - clipped[1:])).to(torch.int32)[first:last]
        offsets = (clipped[first : last + 1] - start).to(torch.int32)
        asked = (self.logits_indices >= start) & (self.logits_indices < end)
        cut = {
            "query_start_loc": offsets, "query_start_loc_host": offsets, "kv_lens": lengths, "kv_lens_host": lengths,
            "logits_indices": self.logits_indices[asked] - start,
        }  # fmt: skip
        for name, declared in fields_of(type(self)).items():
            tensor = getattr(self, name)
            if name in cut:
                cut[name] = cut[name].to(tensor.device)
                continue
            if (dim := declared.dim("tokens")) is not None:
                tensor = tensor.narrow(dim, start, min(end, self.num_tokens) - start)
            if (dim := declared.dim("sequences")) is not None:
                tensor = tensor.narrow(dim, first, last - first + declared.axes[dim].extra)
            if (dim := declared.dim("rows")) is not None:
                tensor = tensor.index_select(dim, asked.nonzero().flatten())
            cut[name] = tensor
        return type(self)(**cut)

    @classmethod
    def build(
        cls,
        token_ids: Sequence[Sequence[int]],
        block_ids: Sequence[Sequence[int]],
        *,
        block_size: int,
        cached: Sequence[int] | None = None,
        all_logits: bool = False,
        device: torch.device | str = "cpu",
        bounds: Bounds | None = None,
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> Self:
        """Make a batch from each sequence's new tokens and the blocks it owns.

        Args:
            token_ids: per sequence, its new tokens; at least one each.
            block_ids: per sequence, all blocks it owns, in order.
            block_size: tokens per block, as the cache has it.
            cached: per sequence, how many tokens the cache holds already; None for none.
            all_logits: ask for the logits of every token instead of each sequence's last.
            device: where the tensors for the model go.
            bounds: what the numbers may be; :meth:`hal.Runner.batch` gives its model's and its cache's.
            fields: the tensors of fields that a subclass declares; those with a default may be left out.

        Raises:
            BatchError: no sequences, a sequence without new tokens, with too few blocks or with one of them twice, or
                numbers that are no integers or out of their range; or ``fields`` lacks one, or one has another shape.
        """
        if type(block_size) is not int or block_size < 1:
            raise BatchError(f"block_size is {block_size!r:.70}", "give the cache's, which is 1 or more")
        bounds = bounds or Bounds()
        size = length_of("token_ids", token_ids)
        cached = [0] * size if cached is None else cached
        if not size or not size == length_of("block_ids", block_ids) == length_of("cached", cached):
            raise BatchError(
                f"a batch of {size} token lists, {len(block_ids)} block lists and {len(cached)} lengths",
                "give at least one sequence, and one of each per sequence",
            )
        low, end = bounds.first_block, min(bounds.num_blocks, 2**31 // block_size)  # slots are int32
        token_ids = [integers_of(row, "token id {}", each, 0, bounds.vocab_size) for row, each in enumerate(token_ids)]
        block_ids = [integers_of(row, "block {}", each, low, end) for row, each in enumerate(block_ids)]
        cached = [integers_of(row, "{} tokens cached", [each], 0, 2**31)[0] for row, each in enumerate(cached)]
        slots: list[int] = []
        positions: list[int] = []
        for row, (tokens, blocks, start) in enumerate(zip(token_ids, block_ids, cached, strict=True)):
            if not tokens:
                raise BatchError(f"sequence {row} has no new token", "leave it out, or give it at least one token")
            length = start + len(tokens)
            if length > bounds.max_length:
                raise BatchError(
                    f"sequence {row} would be {length} tokens long; the model takes {bounds.max_length}",
                    "shorten the prompt, or ask for fewer new tokens",
                )
            if length > len(blocks) * block_size:
                raise BatchError(
                    f"sequence {row} has {length} tokens, but its {len(blocks)} blocks hold {len(blocks) * block_size}",
                    "give it more blocks before the step",
                )
            if len(set(blocks)) < len(blocks):
                twice = next(block for block in blocks if blocks.count(block) > 1)
                raise BatchError(
                    f"sequence {row} has the block {twice} twice, and would overwrite its own tokens there",
                    "give it each block once",
                )
            positions += range(start, length)
            slots += (blocks[p // block_size] * block_size + p % block_size for p in range(start, length))
        lengths = torch.tensor([len(tokens) for tokens in token_ids])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        kv_lens = (torch.tensor(cached) + lengths).to(torch.int32)
        width = max(map(len, block_ids))
        table = torch.tensor([[*blocks, *[0] * (width - len(blocks))] for blocks in block_ids], dtype=torch.int32)
        rows = torch.arange(int(lengths.sum())) if all_logits else starts[1:].long() - 1
        base = Batch(
            token_ids=torch.tensor([token for tokens in token_ids for token in tokens]).to(device),
            positions=torch.tensor(positions).to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int32).to(device),
            block_table=table.to(device),
            query_start_loc=starts.to(device),
            kv_lens=kv_lens.to(device),
            logits_indices=rows.to(device),
            query_start_loc_host=starts,
            kv_lens_host=kv_lens,
        )
        return base if cls is Batch and not fields else cls._extending(base, fields)  # type: ignore[return-value]

    @classmethod
    def _extending(cls, base: Batch, given: Mapping[str, Any]) -> Self:
        """A batch of this class: ``base``, with the fields that the class declares beside."""
        declared, known = fields_of(cls), fields_of(Batch)
        own = {name: each for name, each in declared.items() if name not in known}
        for name in given:
            if name not in own or own[name].twin_of:
                raise BatchError(f"{cls.__name__} has no field {name!r} to be given", nearest(name, own))
        values = {name: getattr(base, name) for name in known}
        sizes, device = base.sizes, base.token_ids.device
        for name, each in own.items():
            source = each.twin_of or name
            if each.twin_of is not None and each.twin_of in values:
                values[name] = values[each.twin_of].cpu()
                continue
            if source not in given and each.default is None:
                raise BatchError(
                    f"{cls.__name__} has the field {source}, and the batch was built without it",
                    f"give a tensor {each} in `fields`",
                )
            tensor = tensor_of(source, given[source]) if source in given else each.default(base)  # type: ignore[misc]
            if tuple(tensor.shape) != each.shape(sizes):
                raise BatchError(
                    f"the field {name} is {list(tensor.shape)}, not {list(each.shape(sizes))}",
                    f"give it the shape {each}",
                )
            values[name] = tensor.to(device="cpu" if each.twin_of else device, dtype=each.dtype)
        return cls(**values)


@attrs.frozen(eq=False)
class SlotBatch(Batch):
    """A batch of a model that keeps a state for each sequence.

    Attributes:
        slots: ``[sequences]``, int32: the slot of each sequence, from ``runner.slots``; padding has the dummy slot.
    """

    slots: Tensor = field("sequences", torch.int32, pad=DUMMY_SLOT)


def one_query_each(tokens: int, starts: list[int]) -> bool:
    """Whether every sequence has one query, and no token is left over.

    Args:
        tokens: queries in all.
        starts: the values of ``query_start_loc``.
    """
    return starts == list(range(tokens + 1))
