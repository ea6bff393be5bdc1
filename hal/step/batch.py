"""Batches: the tokens of one step and the cache locations of their keys and values, as tensors.

The engine owns blocks and slots. It makes a batch with :meth:`Batch.build`, or from its own tensors, and passes it to
the runner. A model that needs more fields declares a subclass, which hal pads, splits and traces in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs
import numpy as np
import torch
from torch import Tensor

from hal.errors import BatchError, nearest
from hal.step.batch_inputs import (
    Bounds,
    check_not_empty,
    check_size,
    check_slots,
    check_values,
    checked_fields,
    integers_of,
    length_of,
    tensor_of,
)
from hal.step.fields import DUMMY_BLOCK, BatchBase, dummy_slots, equal_starts, field, fields_of, host_twin
from hal.step.new_tokens import NewTokens
from hal.step.shape import StepShape

if TYPE_CHECKING:
    from hal.step.page_layout import CacheGroups


@attrs.frozen(eq=False)
class Batch(BatchBase):
    """The tensors that a model reads in one step. ``tokens`` counts the new tokens of all sequences, in sequence order.

    Attributes:
        token_ids: ``[tokens]``, int64.
        positions: ``[tokens]``, int64: each token's position in its sequence, from 0.
        slot_mapping: ``[tokens]``, int32: the cache slot of each token's key and value, ``block * block_size +
            offset``.
        block_table: ``[sequences, max_blocks]``, int32: the blocks of each sequence, in order, padded with 0.
        query_start_loc: ``[sequences + 1]``, int32: the first token of each sequence, then ``tokens``.
        kv_lens: ``[sequences]``, int32: the length of each sequence, including new tokens.
        query_start_loc_host: a CPU copy of ``query_start_loc``.
        kv_lens_host: a CPU copy of ``kv_lens``.
    """

    groups: ClassVar[CacheGroups | None] = None
    """The cache groups of the model's layers; None if all share the block table and the slots."""
    saves: ClassVar[int] = 1
    """The slots of each sequence, in which a step keeps the states after its last tokens."""

    token_ids: Tensor = field("tokens", torch.int64)
    positions: Tensor = field("tokens", torch.int64)
    slot_mapping: Tensor = field("tokens", torch.int32, pad=dummy_slots)
    block_table: Tensor = field("sequences blocks", torch.int32)
    query_start_loc: Tensor = field("sequences+1", torch.int32, pad=equal_starts, by_shape=True)
    kv_lens: Tensor = field("sequences", torch.int32)
    query_start_loc_host: Tensor = host_twin("query_start_loc")
    kv_lens_host: Tensor = host_twin("kv_lens")

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all sequences."""
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.kv_lens.shape[0]

    @property
    def shape(self) -> StepShape:
        """The shape of the step, from the host twins."""
        return StepShape.of_starts(self.token_ids.shape[0], self.query_start_loc_host.tolist())

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes, by name."""
        return {"tokens": self.num_tokens, "sequences": self.num_sequences, "blocks": self.block_table.shape[1]}

    def for_layer(self, layer: int) -> Batch:
        """Return the batch that a layer reads: its block table and slots are those of the layer's cache group."""
        return self

    def group_slots(self, group: int) -> Tensor:
        """Return the slots of groups' entries, in a cache that has one for each ``group`` tokens of a sequence.

        Returns:
            ``[tokens]``, int32: the slot of the group that a token completes, ``block * block_size // group + offset``;
            one of the dummy block for tokens that complete none.
        """
        completes = (self.positions + 1) % group == 0
        return torch.where(completes, self.slot_mapping // group, DUMMY_BLOCK).to(torch.int32)

    def check(self) -> None:
        """Raise BatchError unless every tensor has the shape that its field declares.

        Kernels would read past the end of a tensor that is too short.
        """
        own_type: Any = type(self)
        sizes = self.token_ids.shape[0], self.kv_lens.shape[0], self.block_table.shape[1]
        for name, wanted in _shapes(own_type, *sizes):
            if getattr(self, name).shape != wanted:
                raise BatchError(
                    f"the batch's {name} has the shape {list(getattr(self, name).shape)}, not {list(wanted)}, for "
                    f"{self.num_sequences} sequences of {self.num_tokens} tokens",
                    f"give it the shape {fields_of(type(self))[name]} that {type(self).__name__} declares",
                )

    def split(self, max_tokens: int) -> list[Self]:
        """Split the batch into steps of at most ``max_tokens`` tokens, to run in order.

        A sequence that does not fit into a step continues in the next, which reads the earlier tokens from the cache.

        Raises:
            BatchError: ``max_tokens`` is not an integer of 1 or more.
        """
        if type(max_tokens) is not int or max_tokens < 1:
            raise BatchError(f"max_tokens is {max_tokens!r:.70}", "set max_tokens to an integer of 1 or more")
        if self.num_tokens <= max_tokens:
            return [self]
        return [self._between(start, start + max_tokens) for start in range(0, self.num_tokens, max_tokens)]

    def check_whole(self, max_tokens: int) -> None:
        """Raise BatchError unless each sequence has all its tokens in this batch, and the batch fits into one step.

        Tokens attend to later ones in a model with ``causal=False``, which none of an earlier step could have done.
        """
        counts = self.query_start_loc_host.diff().tolist()
        for row, (new, length) in enumerate(zip(counts, self.kv_lens_host.tolist(), strict=True)):
            if new != length:
                raise BatchError(
                    f"sequence {row} has {new} new tokens and {length - new} in the cache, and the model's tokens "
                    "attend to later ones",
                    "give all tokens of a sequence in one step, as hal.LLM.embed does; such a model generates no text",
                )
        if self.num_tokens > max_tokens:
            raise BatchError(
                f"the batch has {self.num_tokens} tokens, which take several steps of max_prefill_tokens={max_tokens}, "
                "and the model's tokens attend to later ones",
                "give fewer or shorter sequences, or raise max_prefill_tokens in hal's configuration",
            )

    def _between(self, start: int, end: int) -> Self:
        starts = self.query_start_loc_host.long()
        clipped = starts.clamp(start, end)
        rows = (clipped[1:] > clipped[:-1]).nonzero().flatten()
        first, last = int(rows[0]), int(rows[-1]) + 1
        # A sequence's length in this step excludes the tokens of later steps.
        lengths = (self.kv_lens_host - (starts[1:] - clipped[1:])).to(torch.int32)[first:last]
        offsets = (clipped[first : last + 1] - start).to(torch.int32)
        cut = {"query_start_loc": offsets, "query_start_loc_host": offsets, "kv_lens": lengths, "kv_lens_host": lengths}
        for name, declared in fields_of(type(self)).items():
            tensor = getattr(self, name)
            if name in cut:
                cut[name] = cut[name].to(tensor.device)
                continue
            if (dim := declared.dim("tokens")) is not None:
                tensor = tensor.narrow(dim, start, min(end, self.num_tokens) - start)
            if (dim := declared.dim("sequences")) is not None:
                tensor = tensor.narrow(dim, first, last - first + declared.axes[dim].extra)
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
        device: torch.device | str = "cpu",
        bounds: Bounds | None = None,
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> Self:
        """Make a batch from each sequence's new tokens and blocks.

        Args:
            token_ids: the new tokens of each sequence, at least one.
            block_ids: all blocks of each sequence, in order.
            block_size: tokens per block of the cache.
            cached: the number of tokens of each sequence that are already cached; None for 0.
            device: the device of all fields except host twins.
            bounds: ranges to check the numbers against; :meth:`hal.Runner.batch` passes those of its model and cache.
            fields: tensors of the fields that a subclass declares; fields with a default may be left out.

        Raises:
            BatchError: there are no sequences; a sequence has no new tokens, too few blocks, or a block twice; a number
                is not an integer or out of range; or a field is missing or has the wrong shape.
        """
        check_size("block_size", block_size)
        bounds = bounds or Bounds()
        size = length_of("token_ids", token_ids)
        cached = [0] * size if cached is None else cached
        if not size or not size == length_of("block_ids", block_ids) == length_of("cached", cached):
            raise BatchError(
                f"a batch has {size} token lists, {len(block_ids)} block lists and {len(cached)} cached lengths; "
                "the numbers must be equal, and 1 or more",
                "pass one of each per sequence",
            )
        low, end = bounds.first_block, min(bounds.num_blocks, 2**31 // block_size)  # slots are int32
        token_ids = [integers_of(row, "token id {}", each, 0, bounds.vocab_size) for row, each in enumerate(token_ids)]
        block_ids = [integers_of(row, "block {}", each, low, end) for row, each in enumerate(block_ids)]
        cached = [integers_of(row, "{} tokens cached", [each], 0, 2**31)[0] for row, each in enumerate(cached)]
        for row, (tokens, blocks, start) in enumerate(zip(token_ids, block_ids, cached, strict=True)):
            if not tokens:
                raise BatchError(f"sequence {row} has no new token", "leave it out, or pass at least one token")
            length = start + len(tokens)
            if length > bounds.max_length:
                raise BatchError(
                    f"sequence {row} would be {length} tokens long; the model takes {bounds.max_length}",
                    "shorten the prompt, or ask for fewer new tokens",
                )
            if length > len(blocks) * block_size:
                raise BatchError(
                    f"sequence {row} has {length} tokens, but its {len(blocks)} blocks hold {len(blocks) * block_size}",
                    "allocate more blocks for it before the step",
                )
            if len(set(blocks)) < len(blocks):
                twice = next(block for block in blocks if blocks.count(block) > 1)
                raise BatchError(
                    f"sequence {row} has block {twice} twice; it would overwrite its own tokens",
                    "pass each block once per sequence",
                )
        new = NewTokens.of(np.array(cached), np.array([len(tokens) for tokens in token_ids]))
        sizes = {"tokens": len(new.positions), "sequences": size, "blocks": max(map(len, block_ids))}
        made = {
            name: torch.empty(each.shape(sizes), dtype=each.dtype)
            for name, each in fields_of(Batch).items()
            if each.twin_of is None
        }
        host = {name: each.numpy() for name, each in made.items()}
        host["token_ids"][:] = [token for tokens in token_ids for token in tokens]
        table = np.array([[*blocks, *[0] * (sizes["blocks"] - len(blocks))] for blocks in block_ids], np.int32)
        new.write(host, [table], block_size)
        check_slots(host["slot_mapping"].tolist(), block_size)
        twins = {name: made[each.twin_of] for name, each in fields_of(Batch).items() if each.twin_of is not None}
        base = Batch(**{name: each.to(device) for name, each in made.items()}, **twins)
        return base if cls is Batch and not fields else cls.extending(base, fields)  # type: ignore[return-value]

    @classmethod
    def from_tensors(cls, *, block_size: int, bounds: Bounds | None = None, **tensors: Tensor) -> Self:
        """Make a batch of an engine's tensors, and check them.

        Values on a device are not read, except through the host twins: the host would wait for the device in each step.

        Args:
            block_size: tokens per block of the cache.
            bounds: ranges to check the numbers against; those of a runner are ``runner.bounds``.
            tensors: the fields. Host twins may be left out if the tensors are on the CPU.

        Raises:
            BatchError: a field is missing or unknown; a tensor has the wrong shape or dtype, or is on another device
                than the others; or the values contradict each other or are out of range.
        """
        check_size("block_size", block_size)
        given = checked_fields(cls, tensors)
        base = Batch(**{name: given.pop(name) for name in fields_of(Batch)})
        base.check()
        check_values(base, block_size, bounds or Bounds())
        return base if cls is Batch else cls.extending(base, given)  # type: ignore[return-value]

    @classmethod
    def extending(cls, base: Batch, given: Mapping[str, Any]) -> Self:
        """Return a batch of this class with the tensors of ``base``, and the fields that the class adds.

        Raises:
            BatchError: a field is missing or unknown, or has the wrong shape.
        """
        declared, known = fields_of(cls), fields_of(Batch)
        own = {name: each for name, each in declared.items() if name not in known}
        for name in given:
            if name not in own or own[name].twin_of:
                raise BatchError(f"{cls.__name__} has no field {name!r} that can be set", nearest(name, own))
        values = {name: getattr(base, name) for name in known}
        sizes, device = base.sizes, base.token_ids.device
        for name, each in own.items():
            source = each.twin_of or name
            if each.twin_of is not None and each.twin_of in values:
                values[name] = values[each.twin_of].cpu()
                continue
            if source not in given and each.default is None:
                raise BatchError(
                    f"the field {source} of {cls.__name__} is missing and has no default",
                    f"pass a tensor {each} in `fields`",
                )
            tensor = tensor_of(source, given[source]) if source in given else each.default(base)  # type: ignore[misc]
            if tensor.is_floating_point() and not each.dtype.is_floating_point:
                raise BatchError(f"the field {name} is {tensor.dtype}, not {each.dtype}", "pass integers")
            if tuple(tensor.shape) != each.shape(sizes):
                raise BatchError(
                    f"the field {name} has the shape {list(tensor.shape)}, not {list(each.shape(sizes))}",
                    f"pass a tensor {each}",
                )
            values[name] = tensor.to(device="cpu" if each.twin_of else device, dtype=each.dtype)
        return cls(**values)


@lru_cache(maxsize=256)
def _shapes(batch_type: Any, tokens: int, sequences: int, blocks: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the shape of each field. A running engine repeats a few sizes.

    Raises:
        BatchError: there is no token.
    """
    sizes = {"tokens": tokens, "sequences": sequences, "blocks": blocks}
    check_not_empty(sizes)
    return [(name, each.shape(sizes)) for name, each in fields_of(batch_type).items()]
