"""States per sequence that are saved at the ends of prefixes, so that later sequences resume from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


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
