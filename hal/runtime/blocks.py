"""Blocks of the KV cache, handed out and taken back."""

from __future__ import annotations

from collections import Counter

from hal.kv_cache import DUMMY_BLOCK


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
