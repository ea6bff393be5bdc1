"""Allocation of the KV cache's blocks and of slots for states per sequence, and prefix caching.

Prompts with a common prefix share its full blocks, and start from its saved states per sequence.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from hal.step.fields import DUMMY_BLOCK, DUMMY_SLOT


class BlockAllocator:
    """Allocates blocks of a cache, adjacent ones if possible, because adjacent blocks can be read without a copy."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(DUMMY_BLOCK + 1, num_blocks))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Number of blocks that sequences hold."""
        return len(self._taken)

    def take(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks, or return None if fewer are free."""
        if not 0 < count <= len(self._free):
            return None if count else []
        starts = range(len(self._free) - count + 1)
        first = next((i for i in starts if self._free[i + count - 1] - self._free[i] == count - 1), 0)
        taken = self._free[first : first + count]
        del self._free[first : first + count]
        self._taken.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks.

        Raises:
            ValueError: a block is not allocated, or is given twice: two later owners would overwrite each other. No
                block is freed then.
        """
        wrong = sorted(block for block, times in Counter(blocks).items() if times > 1 or block not in self._taken)
        if wrong:
            raise ValueError(f"blocks {wrong} were freed twice, or never allocated")
        self._taken.difference_update(blocks)
        self._free = sorted(self._free + blocks)


class SlotAllocator:
    """Allocates slots of states per sequence, and resets each one for its new sequence.

    Args:
        num_slots: the number of slots, including the dummy slot; 0 if the model keeps no state per sequence.
        reset: clears the states in the given slots; called at each allocation.
    """

    def __init__(self, num_slots: int, reset: Callable[[Iterable[int]], None]) -> None:
        self._free = list(range(num_slots - 1, DUMMY_SLOT, -1))
        self._taken: set[int] = set()
        self._reset = reset
        self.needed = num_slots > 0

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Allocate ``count`` slots with zeroed states, or return None if fewer are free."""
        if not 0 <= count <= len(self._free):
            return None
        taken = self._free[: -count - 1 : -1]
        self._reset(taken)  # If it raises, the slots stay free.
        del self._free[len(self._free) - count :]
        self._taken.update(taken)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots.

        Raises:
            ValueError: a slot is not allocated, or is given twice. No slot is freed then.
        """
        given = list(slots)
        if len(set(given)) < len(given) or not self._taken.issuperset(given):
            raise ValueError(f"slots {given} were freed twice, or never allocated")
        self._taken.difference_update(given)
        self._free += sorted(given, reverse=True)


class PrefixCache:
    """Allocates blocks like :class:`BlockAllocator`, and shares full blocks between sequences with a common prefix.

    A block without owners stays cached until its memory is needed; the least recently used block is evicted first.

    Args:
        allocator: the allocator of the underlying blocks.
        block_size: tokens per block.
        states: saved states, for a model that keeps some per sequence: a prefix ends where its states are saved. None
            for other models.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, states: SavedStates | None = None) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._states = states
        self._owners: Counter[int] = Counter()
        self._holding: OrderedDict[bytes, int] = OrderedDict()  # blocks by digest, least recently used first
        self._contents: dict[int, bytes] = {}
        self._stale: set[int] = set()

    @property
    def num_held(self) -> int:
        """Number of blocks that sequences hold. Others that are cached do not count."""
        return sum(owners > 0 for owners in self._owners.values())

    def reuse(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached blocks of the longest prefix of ``tokens``. The caller becomes an owner of them.

        If the model keeps states per sequence, :meth:`load_states` gives the sequence those of the prefix.
        """
        found: list[bytes] = []
        for digest in self._digests(tokens):
            if digest not in self._holding:
                break
            found.append(digest)
        if self._states is not None:
            while found and found[-1] not in self._states:
                found.pop()
        self._use(found)
        blocks = [self._holding[digest] for digest in found]
        self._owners.update(blocks)
        return blocks

    def remember(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Record that the caller's ``blocks`` now hold ``tokens``. A last block that is not full is not recorded."""
        known = []
        for block, digest in zip(blocks, self._digests(tokens), strict=False):
            if block in self._stale:
                break
            if digest not in self._holding and block not in self._contents:
                self._holding[digest] = block
                self._contents[block] = digest
            if digest in self._holding:
                known.append(digest)
        self._use(known)

    def places(self, start: int, end: int) -> list[int]:
        """Return the lengths after ``start``, up to ``end``, at which a sequence's states are to be saved."""
        return [] if self._states is None else self._states.places(start, end)

    def save_states(self, blocks: Sequence[int], tokens: Sequence[int], slot: int) -> None:
        """Save the states in ``slot``, which are those after ``tokens``, if their number is one of :meth:`places`.

        Args:
            blocks: the blocks of the sequence.
            tokens: the tokens of the sequence that have run.
            slot: the slot of the sequence.
        """
        if self._states is not None and self.places(len(tokens) - 1, len(tokens)) and self._stale.isdisjoint(blocks):
            self._states.save(self._digest(tokens), slot)

    def load_states(self, tokens: Sequence[int], slot: int) -> None:
        """Copy the states after ``tokens``, a prefix that :meth:`reuse` has found, to ``slot``."""
        if self._states is not None:
            self._states.load(self._digest(tokens), slot)

    def take(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks, evicting cached ones if needed, or return None if fewer are available."""
        idle = [block for block in self._holding.values() if not self._owners[block]]
        missing = count - self._allocator.num_free
        if missing > len(idle):
            return None
        for block in idle[: max(missing, 0)]:
            self._forget(block)
        taken = self._allocator.take(count)
        self._owners.update(taken or ())
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """End the caller's ownership of blocks.

        Raises:
            ValueError: a block is freed more often than it has owners. No block is freed then.
        """
        if ownerless := [block for block, times in Counter(blocks).items() if self._owners[block] < times]:
            raise ValueError(f"blocks {ownerless} were freed twice, or never allocated")
        self._owners.subtract(blocks)
        ownerless = [each for each in dict.fromkeys(blocks) if not self._owners[each] and each not in self._contents]
        self._stale.difference_update(ownerless)
        self._allocator.give_back(ownerless)

    def clear(self) -> None:
        """Forget all contents, which other weights computed. Blocks with owners are not recorded again for these."""
        for block in list(self._contents):
            del self._holding[self._contents.pop(block)]
            if not self._owners[block]:
                self._allocator.give_back([block])
        if self._states is not None:
            self._states.clear()
        self._stale.update(block for block, owners in self._owners.items() if owners)

    def _use(self, chain: list[bytes]) -> None:
        """Mark blocks as used, in reverse: a block is useless without those before it, so the last is evicted first."""
        for digest in reversed(chain):
            self._holding.move_to_end(digest)

    def _forget(self, block: int) -> None:
        del self._holding[self._contents.pop(block)]
        self._allocator.give_back([block])

    def _digest(self, tokens: Sequence[int]) -> bytes:
        """Return the digest of whole blocks of tokens."""
        return list(self._digests(tokens))[-1]

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield a digest of each full block and all tokens before it."""
        digest = hashlib.sha256()
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            digest.update(array("q", tokens[end - self._block_size : end]).tobytes())
            yield digest.copy().digest()


class SavedStates:
    """Keeps copies of states per sequence, each in a slot. The least recently used copy gives way to a new one.

    Args:
        slots: the slots of the copies, at least one.
        interval: tokens between two places of a sequence where its states are saved; a multiple of the block size.
        copy: copies the states in one slot to another: ``copy(source, target)``.
    """

    def __init__(self, slots: Iterable[int], interval: int, copy: Callable[[int, int], None]) -> None:
        self._free = list(slots)
        self._num_slots, self._interval, self._copy = len(self._free), interval, copy
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest of the prefix, least recently used first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def places(self, start: int, end: int) -> list[int]:
        """Return the lengths after ``start``, up to ``end``, at which a sequence's states are saved.

        These are multiples of the interval. Earlier ones are left out if there are more than slots.
        """
        first = (start // self._interval + 1) * self._interval
        return list(range(first, end + 1, self._interval))[-self._num_slots :]

    def save(self, digest: bytes, slot: int) -> None:
        """Copy the states in ``slot``, unless those of this prefix are saved already."""
        if digest not in self._slots:
            target = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._copy(slot, target)
            self._slots[digest] = target
        self._slots.move_to_end(digest)

    def load(self, digest: bytes, slot: int) -> None:
        """Copy the saved states of a prefix to ``slot``."""
        self._slots.move_to_end(digest)
        self._copy(self._slots[digest], slot)

    def clear(self) -> None:
        """Forget all copies."""
        self._free += self._slots.values()
        self._slots.clear()
