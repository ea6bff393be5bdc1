"""Quantizations of all linear layers in one way, except some that lists name."""

from __future__ import annotations

from collections.abc import Mapping

from hal.errors import CheckpointError
from hal.quantization.checkpoint_format import Quantization
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.stored_layer import StoredAs


class ExcludedLayers(Quantization):
    """One way to store all layers but those of lists.

    Args:
        stored_as: how the layers are stored.
        lists: by what errors call them, lists of names of layers, or of consecutive parts of names, such as ``lm_head``
            or ``layers.0.mlp.``. A part ``*`` stands for any one. A list may be None.

    Raises:
        CheckpointError: one is not a list of names.
    """

    def __init__(self, stored_as: StoredAs | None, lists: Mapping[str, object]) -> None:
        self._stored_as = stored_as
        self._excluded: list[tuple[list[str], str]] = []
        for where, names in lists.items():
            entries = [] if names is None else names
            if not isinstance(entries, list) or not all(isinstance(each, str) and each.strip(".") for each in entries):
                raise CheckpointError(f"{where} is {names!r:.60}, not a list of names", AGAIN)
            self._excluded += [(each.strip(".").split("."), f"{each!r:.80} in {where}") for each in entries]

    def stored_as(self, layer: str) -> StoredAs | None:
        return None if self.excludes(layer) else self._stored_as

    def exclusion(self, layer: str) -> str:
        return self.excludes(layer) or super().exclusion(layer)

    def excludes(self, layer: str) -> str | None:
        """Return the entry that names a layer, and its list, or None."""
        parts = layer.split(".")
        for each, entry in self._excluded:
            for start in range(len(parts) - len(each) + 1):
                if all(mine in ("*", theirs) for mine, theirs in zip(each, parts[start:], strict=False)):
                    return entry
        return None
