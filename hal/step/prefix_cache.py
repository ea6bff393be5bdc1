"""Reusing the cache of prompts that begin alike: which full blocks hold what, and who owns them."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from hal.step.block_allocator import BlockAllocator


class PrefixCache:
    """Hands out blocks as :class:`BlockAllocator` does, and shares full ones between sequences that begin alike.

    A block that nobody owns any more stays as it is, for whoever comes with the same beginning, until its room is
    needed; the one unused for longest goes first.

    Args:
        allocator: where blocks come from, and go when they are forgotten.
        block_size: tokens per block.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._owners: Counter[int] = Counter()
        self._holding: OrderedDict[bytes, int] = OrderedDict()  # by contents; least recently used first
        self._contents: dict[int, bytes] = {}

    def reuse(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the beginning of ``tokens``, as far as there are any; the caller is an owner then."""
        found: list[bytes] = []
        for digest in self._digests(tokens):
            if digest not in self._holding:
                break
            found.append(digest)
        self._use(found)
        blocks = [self._holding[digest] for digest in found]
        self._owners.update(blocks)
        return blocks

    def remember(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Note that ``blocks``, owned by the caller, now hold ``tokens``. A last block that is not full is left out."""
        known = []
        for block, digest in zip(blocks, self._digests(tokens), strict=False):
            if digest not in self._holding and block not in self._contents:
                self._holding[digest] = block
                self._contents[block] = digest
            if digest in self._holding:
                known.append(digest)
        self._use(known)

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks that nobody reads, or None if there are fewer."""
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
        """End the caller's ownership.

        Raises:
            ValueError: a block is given back more often than it has owners. Then none is taken back.
        """
        if ownerless := [block for block, times in Counter(blocks).items() if self._owners[block] < times]:
            raise ValueError(f"blocks {ownerless} were given back twice, or were never taken")
        self._owners.subtract(blocks)
        self._allocator.give_back(
            [each for each in dict.fromkeys(blocks) if not self._owners[each] and each not in self._contents]
        )

    def _use(self, chain: list[bytes]) -> None:
        """Note a use. A block is of no use without those before it, so the end of the chain counts as older."""
        for digest in reversed(chain):
            self._holding.move_to_end(digest)

    def _forget(self, block: int) -> None:
        del self._holding[self._contents.pop(block)]
        self._allocator.give_back([block])

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Of each full block, with all that comes before it: the same tokens after others have other keys."""
        digest = hashlib.sha256()
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            digest.update(array("q", tokens[end - self._block_size : end]).tobytes())
            yield digest.copy().digest()
