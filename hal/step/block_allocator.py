"""Blocks of the KV cache, handed out and taken back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from hal.step.state import DUMMY_BLOCK, DUMMY_SLOT


class BlockAllocator:
    """Hands out the blocks of a cache, one after another where it can, since neighbours can be read without a copy."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(DUMMY_BLOCK + 1, num_blocks))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks, or None if fewer are free."""
        if not 0 < count <= len(self._free):
            return None if count else []
        starts = range(len(self._free) - count + 1)
        first = next((i for i in starts if self._free[i + count - 1] - self._free[i] == count - 1), 0)
        taken = self._free[first : first + count]
        del self._free[first : first + count]
        self._taken.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: one of them is not out, or is named twice: its next two owners would overwrite each other. Then
                none is taken back.
        """
        wrong = sorted(block for block, times in Counter(blocks).items() if times > 1 or block not in self._taken)
        if wrong:
            raise ValueError(f"blocks {wrong} were given back twice, or were never taken")
        self._taken.difference_update(blocks)
        self._free = sorted(self._free + blocks)


class SlotAllocator:
    """Hands out the slots of states per sequence, reset for the sequence that begins there.

    Args:
        num_slots: slots, the dummy slot included; 0 where the model keeps no state per sequence.
        reset: called with the slots that are handed out, to forget what their last owners left.
    """

    def __init__(self, num_slots: int, reset: Callable[[Iterable[int]], None]) -> None:
        self._free = list(range(num_slots - 1, DUMMY_SLOT, -1))
        self._taken: set[int] = set()
        self._reset = reset
        self.needed = num_slots > 0

    @property
    def num_free(self) -> int:
        """Slots that can be handed out."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` slots, their states zero, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._reset(taken)
        self._taken.update(taken)
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        """Take slots back.

        Raises:
            ValueError: one of them is not out, or is named twice. Then none is taken back.
        """
        given = list(slots)
        if len(set(given)) < len(given) or not self._taken.issuperset(given):
            raise ValueError(f"slots {given} were given back twice, or were never taken")
        self._taken.difference_update(given)
        self._free += sorted(given, reverse=True)
