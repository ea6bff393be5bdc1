"""Quantizations of all linear layers in one way, except some that a list names."""

from __future__ import annotations

from hal.errors import CheckpointError
from hal.quantization.checkpoint_format import Quantization
from hal.quantization.int8_arithmetic import AGAIN
from hal.quantization.scheme import Scheme


class ExcludedLayers(Quantization):
    """One scheme for all layers but those of a list.

    Args:
        scheme: the scheme.
        excluded: names of layers, or consecutive parts of names, such as ``lm_head`` or ``layers.0.mlp``. A part ``*``
            stands for any one. None for no layers.
        where: the section, for errors.

    Raises:
        CheckpointError: ``excluded`` is not a list of names.
    """

    def __init__(self, scheme: Scheme, excluded: object, where: str) -> None:
        names = [] if excluded is None else excluded
        if not isinstance(names, list) or not all(isinstance(each, str) and each for each in names):
            raise CheckpointError(f"modules_to_not_convert of {where} is {excluded!r:.60}, not a list of names", AGAIN)
        self._scheme, self._excluded = scheme, [each.split(".") for each in names]

    def scheme(self, layer: str) -> Scheme | None:
        return None if self.excludes(layer) else self._scheme

    def excludes(self, layer: str) -> bool:
        """Return whether the list names a layer."""
        parts = layer.split(".")
        return any(
            all(mine in ("*", theirs) for mine, theirs in zip(each, parts[start:], strict=False))
            for each in self._excluded
            for start in range(len(parts) - len(each) + 1)
        )
