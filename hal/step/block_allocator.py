"""Allocation of the KV cache's blocks, and of slots for states per sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hal.step.dummies import DUMMY_BLOCK, DUMMY_SLOT


class BlockAllocator:
    """Allocates blocks of a cache, adjacent ones if possible, because adjacent blocks can be read without a copy."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(DUMMY_BLOCK + 1, num_blocks))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

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
